"""`specdec lab policies` compares what recordings tell, and refuses what it cannot."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from research.policies import __main__ as policies
from specdec_core.config import Sampling
from specdec_core.models.pair import Pair
from tests.commands import Command, assert_refused, prompts_file
from tests.jobs.conftest import record_prompts
from tests.registered import runs_in

SETS = {"sums": [f"x{i} = {i} + " for i in range(5)], "loops": [f"for i in {i}:" for i in "abc"]}
SEARCH = {
    "search": [
        {"drafter": {"kind": "draft_model", "policy": policy}}
        for policy in (
            {"kind": "fixed", "max_tokens": [1, 2, 3, 4, 5]},
            {"kind": "confidence", "threshold": [0.2, 0.4, 0.6]},
            {"kind": "specdecpp", "head": "*"},
            {"kind": "oracle"},
        )
    ]
}
HARDWARE = {"name": "far away", "target": 0.1, "drafts": {"*": 0.01}}


@pytest.fixture(scope="module")
def home(empty_store: Path, tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with two recordings, a search and a hardware file."""
    home = tmp_path_factory.mktemp("home")
    shutil.copy(empty_store, home / "mlflow.db")
    (home / "search.yaml").write_text(json.dumps(SEARCH))
    (home / "h.yaml").write_text(json.dumps(HARDWARE))
    for name, texts in SETS.items():
        prompts = prompts_file(home, texts, name)
        record_prompts(tiny_pair, prompts, home / "traces" / name, 24)
    return home


def test_two_recordings_are_compared_and_choices_carried_over(command: Command, home: Path) -> None:
    done = command(
        policies.main,
        home,
        *("--traces", "sums", "--traces", home / "traces" / "loops"),
        *("--search", home / "search.yaml", "--hardware", home / "h.yaml"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in ("over best", "of the", "loss on", "18 replays", "a second", "far away"):
        assert shown in done.stdout
    folder = home / "policies" / "sums+loops"
    best = pd.read_csv(folder / "families.csv")
    assert set(zip(best["recording"], best["family"], strict=True)) == {
        (name, family) for name in SETS for family in ("fixed", "confidence", "oracle")
    }
    everything = pd.read_csv(folder / "configurations.csv")
    assert len(everything) == 18
    for row in best.to_dict("records"):
        family = everything[everything["recording"] == row["recording"]]
        family = family[family["family"] == row["family"]]
        assert row["latency_ms"] == family["latency_ms"].min()
    moved = pd.read_csv(folder / "transfer.csv")
    assert (moved["loss"] >= 0).all()
    page = (folder / "policies.md").read_text()
    assert page.count("| fixed |") >= 2
    assert re.search(r"- draft, K=\d: .*max tokens \d", page)
    assert json.loads((folder / "policies.json").read_text())["configurations_per_second"] > 0

    client, [run] = runs_in(home)
    assert run.info.status == "FINISHED"
    speedup = best.set_index(["recording", "family"]).loc[("sums", "oracle"), "speedup"]
    assert run.data.metrics["sums.draft.oracle.speedup"] == pytest.approx(speedup)
    assert "policies.md" in {file.path for file in client.list_artifacts(run.info.run_id)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--traces", "none"], "no such folder, and no recording of that name"),
        (["--traces", "sums", "--traces", "sums"], "was given already"),
        (["--traces", "sums", "--profile", "none.json"], r"none\.json: no such profile"),
    ],
)
def test_bad_input_is_one_line_with_exit_code_2(
    command: Command, home: Path, arguments: list[str], message: str
) -> None:
    done = command(policies.main, home, *arguments)
    assert_refused(done, message)


def test_a_recording_of_plain_sampling_is_replayed_with_rounds_that_are_drawn(
    tiny_pair: Pair, command: Command, home: Path
) -> None:
    folder = home / "traces" / "sampled"
    record_prompts(tiny_pair, home / "sums.jsonl", folder, 24, Sampling(temperature=1.0, top_k=50))
    done = command(
        policies.main,
        home,
        *("--traces", "sampled", "--search", home / "search.yaml", "--hardware", home / "h.yaml"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "its rounds are drawn" in done.stdout
