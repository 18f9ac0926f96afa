"""`specdec lab scale` counts on nodes of this machine, and says first when they do not fit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from research.scale import __main__ as scale
from tests.commands import Command

ROOT = Path(__file__).parents[3]


def test_more_nodes_than_memory_holds_are_one_line(command: Command, tmp_path: Path) -> None:
    done = command(scale.main, tmp_path, "--nodes", "2,100000", "--idle", 1)
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: --nodes 100000: .* GiB of memory .* free; give fewer\n", done.stderr
    )
    done = command(scale.main, tmp_path, "--nodes", "2,x")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_every_trial_is_counted_and_logged_on_one_node_and_on_two(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "research.scale", "--nodes", "1,2", "--trials", "20"]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        [*command, "--idle", "0.05"],
        cwd=ROOT,
        env={**environment, "COLUMNS": "120"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^ ?(\S.*?) {2,}(\S.*)$", done.stdout, re.MULTILINE))
    assert rows["nodes × slots"].split("  ")[0] == "1 × 1"
    assert rows["trials"].split() == ["20", "20"]
    assert all(float(rate) > 0 for rate in rows["trials a second"].split())
    assert "starting 2 nodes" in done.stdout
