"""The examples run as they stand there."""

import os
import re
import runpy
import sys

import pytest

from specdec_core.config import PairSpec
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import load_pair
from tests.commands import ROOT, ran

EXAMPLES = ROOT / "examples"


def test_the_engine_step_by_step_writes_what_the_target_would_in_fewer_forwards(capsys):
    engine = Engine(load_pair(PairSpec(drafts={})))
    [alone] = engine.generate([Request("one", engine.encode("def main("), 48)])
    runpy.run_path(str(EXAMPLES / "draft_verify_accept.py"))
    printed = capsys.readouterr().out
    assert alone.text[:80] in printed
    tokens, forwards = map(int, re.findall(r"(\d+) tokens in (\d+) forwards", printed)[0])
    assert forwards < tokens


@pytest.mark.long
def test_the_sweep_finds_a_champion(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = ran(sys.executable, EXAMPLES / "sweep.py", tmp_path, env=environment)
    assert "champion:" in printed
    assert printed.count("×") == 2
    [folder] = (tmp_path / "sweeps").iterdir()
    assert (folder / "finished").exists()
