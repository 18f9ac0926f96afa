"""`specdec policies` compares what recordings tell, and refuses what it cannot."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from mlflow import MlflowClient

from cluster.ray_session import ray_session
from cluster.recording import RecordingPlan, run_recording
from specdec_core.config import PairSpec

ROOT = Path(__file__).parents[2]
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
def home(tiny_spec: PairSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with two recordings, a search and a hardware file."""
    home = tmp_path_factory.mktemp("home")
    (home / "search.yaml").write_text(json.dumps(SEARCH))
    (home / "h.yaml").write_text(json.dumps(HARDWARE))
    with ray_session():
        for name, texts in SETS.items():
            prompts = home / f"{name}.jsonl"
            prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
            plan = RecordingPlan.model_validate(
                {
                    "pair": tiny_spec.model_dump(),
                    "prompts": {"source": str(prompts)},
                    "max_new_tokens": 24,
                }
            )
            run_recording(plan, home, name=name)
    return home


def policies(home: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
    return subprocess.run(
        [sys.executable, "-m", "jobs.policies", *map(str, arguments)],
        cwd=ROOT,
        env={**kept, "SPECDEC_HOME": str(home), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_two_recordings_are_compared_and_choices_carried_over(home: Path) -> None:
    done = policies(
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
        own = everything[everything["recording"] == row["recording"]]
        own = own[own["family"] == row["family"]]
        assert row["latency_ms"] == own["latency_ms"].min()
    moved = pd.read_csv(folder / "transfer.csv")
    assert (moved["loss"] >= 0).all()
    assert (folder / "policies.md").read_text().count("| fixed |") >= 2
    assert json.loads((folder / "policies.json").read_text())["configurations_per_second"] > 0

    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    experiments = [e.experiment_id for e in client.search_experiments() if e.name != "Default"]
    (run,) = client.search_runs(experiments)
    assert run.info.status == "FINISHED"
    speedup = best.set_index(["recording", "family"]).loc[("sums", "oracle"), "speedup"]
    assert run.data.metrics["sums.draft.oracle.speedup"] == pytest.approx(speedup)
    assert "policies.md" in {file.path for file in client.list_artifacts(run.info.run_id)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--traces", "none"], "no recording in it"),
        (["--traces", "sums", "--traces", "sums"], "was given already"),
        (["--traces", "sums", "--hardware", "none.yaml"], r"none\.yaml: no such file"),
        (["--traces", "sums", "--profile", "none.json"], r"none\.json: no such profile"),
        (["--traces", "sums", "--name", "a/b"], "expected a folder's name"),
    ],
)
def test_bad_input_is_one_line_with_exit_code_2(
    home: Path, arguments: list[str], message: str
) -> None:
    done = policies(home, *arguments)
    assert done.returncode == 2
    assert re.fullmatch(rf"error: .*{message}.*\n", done.stderr)
