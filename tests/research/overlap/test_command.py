"""`specdec lab overlap` times PEARL beside chains, and everybody writes what the target writes."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from research.overlap import __main__ as overlap
from tests.commands import Command, prompts_file


@pytest.mark.long
def test_a_comparison_is_written_with_its_trace_and_nobodys_output_differs(
    command: Command, ray_running: None, tiny_pair_folders: dict[str, Path], tmp_path: Path
) -> None:
    prompts = prompts_file(tmp_path, ["def main():"])
    done = command(
        overlap.main,
        tmp_path,
        *("--target", tiny_pair_folders["target"]),
        *("--draft", f"draft={tiny_pair_folders['draft']}"),
        *("--prompts", prompts, "--limit", 1, "--repeats", 1, "--max-new-tokens", 200),
        *("--lengths", "3", "--no-compile", "--dtype", "float32", "--name", "mine", "--lookups"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "overlap" / "mine"
    race = pd.read_csv(folder / "overlap.csv")
    assert set(race["where"]) == {"one thread", "two threads", "draft beside target"}
    assert (race["differing"] == 0).all()
    assert (race["tokens_per_second"] > 0).all()
    pearl = race[race["where"] == "draft beside target"]
    assert (pearl["mat"] > 1).any()  # of 200 tokens, some of the draft's came in time
    for name in ("report.md", "report.html", "timeline.csv"):
        assert (folder / name).stat().st_size > 100
    events = json.loads((folder / "trace.json").read_text())
    spans = [e for e in events.get("traceEvents", events) if e["ph"] == "X"]
    assert {span["name"] for span in spans} >= {"draft", "verify"}
    assert str(folder / "report.html") in done.stdout


def test_bad_input_is_one_line(command: Command, tmp_path: Path) -> None:
    done = command(overlap.main, tmp_path, "--name", "../elsewhere")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "expected a folder's name" in done.stderr
    done = command(overlap.main, tmp_path, "--target", "bundled:target")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no draft model" in done.stderr
