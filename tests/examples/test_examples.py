"""The examples run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_core.config import PairSpec
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import load_pair

ROOT = Path(__file__).parents[2]


def run(name: str, *arguments: object) -> str:
    """What the example prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def alone() -> str:
    """What the bundled target writes by itself behind the examples' prompt."""
    engine = Engine(load_pair(PairSpec(drafts={})))
    [generation] = engine.generate([Request("one", engine.encode("def main("), 48)])
    return generation.text


@pytest.mark.parametrize("name", ["draft_verify_accept.py", "own_policy.py"])
def test_an_example_writes_what_the_target_would_in_fewer_forwards(name: str, alone: str) -> None:
    printed = run(name)
    assert alone[:80] in printed
    tokens, forwards = map(
        int, re.findall(r"(\d+) tokens in (\d+) (?:forwards|rounds)", printed)[0]
    )
    assert forwards < tokens


@pytest.mark.long
def test_the_sweep_finds_a_champion(tmp_path: Path) -> None:
    printed = run("sweep.py", tmp_path)
    assert "champion:" in printed
    assert printed.count("×") == 2
    [folder] = (tmp_path / "sweeps").iterdir()
    assert (folder / "finished").exists()
