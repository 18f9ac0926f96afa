"""`specdec lab scan` compares a ranking by replay with the program itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from research.scan import __main__ as scan
from research.scan.study import ScanResult
from specdec_core.config import AUTOREGRESSIVE, PairConfiguration, Sampling
from specdec_core.models.pair import Pair
from tests.commands import Command, assert_refused, prompts_file
from tests.jobs.conftest import record_prompts


def of_pair(pair: Pair, folder: Path) -> list[object]:
    """The options for autoregressive decoding of the pair."""
    file = PairConfiguration(pair=pair.spec, configuration=AUTOREGRESSIVE).save(folder / "p.yaml")
    return ["--config", file]


def test_a_ranking_is_held_against_transformers(
    command: Command, tiny_pair: Pair, tmp_path: Path
) -> None:
    prompts = prompts_file(tmp_path, (f"x{i} = {i} + " for i in range(2)), "sums")
    times = {"name": "far", "target": 0.1, "drafts": {"*": 0.001}}
    (tmp_path / "h.yaml").write_text(json.dumps(times))
    record_prompts(tiny_pair, prompts, tmp_path / "traces" / "sums", 12)
    options = [
        "--hardware",
        tmp_path / "h.yaml",
        "--lengths",
        "1,3",
        "--repeats",
        "1",
        "--limit",
        "1",
    ]
    told = ["--to", "transformers", *of_pair(tiny_pair, tmp_path), *options, "--name", "one"]
    done = command(scan.main, tmp_path, *told)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "scans" / "one"
    result = ScanResult.model_validate_json((folder / "scan.json").read_text())
    expected = [each.expected for each in result.scanned]
    assert expected == sorted(expected, reverse=True)
    assert result.plain.configuration.drafter is None
    chains = {
        each.row.settings["num_assistant_tokens"]
        for each in result.scanned
        if "num_assistant_tokens" in each.row.settings
    }
    assert {1, 3} <= chains
    # Whatever is told, transformers writes the same.
    written = {str([take.outputs for take in each.row.takes[0]]) for each in result.scanned}
    assert len(written) == 1
    assert result.regret == pytest.approx(
        1 - result.first.row.tokens_per_second / max(result.speeds)
    )
    assert "Spearman" in done.stdout
    assert (folder / "scan.md").exists()


def test_a_sampled_recording_ranks_nothing_that_is_timed_greedily(
    command: Command, tiny_pair: Pair, tmp_path: Path
) -> None:
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "x = 1 + "}))
    times = {"name": "far", "target": 0.1, "drafts": {"*": 0.001}}
    (tmp_path / "h.yaml").write_text(json.dumps(times))
    drawn = Sampling(temperature=1.0, coupling="gumbel")
    record_prompts(tiny_pair, tmp_path / "sums.jsonl", tmp_path / "traces" / "drawn", 8, drawn)
    options = ["--to", "transformers", "--hardware", tmp_path / "h.yaml"]
    done = command(scan.main, tmp_path, *options, *of_pair(tiny_pair, tmp_path))
    assert done.returncode == 2
    assert "was sampled, and a scan decodes greedily" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "sglang"), "this library does not run it; possible: transformers, vllm"),
        (("--to", "vllm", "--lengths", "x"), "--lengths x: "),
        (("--to", "vllm"), "no recording of"),
    ],
)
def test_what_cannot_be_scanned_is_one_line(
    command: Command, tiny_pair: Pair, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    done = command(scan.main, tmp_path, *options, *of_pair(tiny_pair, tmp_path))
    assert_refused(done, message)
    assert not (tmp_path / "scans").exists()
