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


def run(name, *arguments):
    """What the example prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return ran(sys.executable, EXAMPLES / name, *arguments, env=environment)


def test_the_examples_write_what_the_target_would_in_fewer_forwards(capsys):
    engine = Engine(load_pair(PairSpec(drafts={})))
    [alone] = engine.generate([Request("one", engine.encode("def main("), 48)])
    runpy.run_path(str(EXAMPLES / "draft_verify_accept.py"))
    # In another process, because it adds a kind of policy.
    for printed in (capsys.readouterr().out, run("own_policy.py")):
        assert alone.text[:80] in printed
        counts = re.findall(r"(\d+) tokens in (\d+) (?:forwards|rounds)", printed)[0]
        tokens, forwards = map(int, counts)
        assert forwards < tokens


@pytest.mark.long
def test_the_sweep_finds_a_champion(tmp_path):
    printed = run("sweep.py", tmp_path)
    assert "champion:" in printed
    assert printed.count("×") == 2
    [folder] = (tmp_path / "sweeps").iterdir()
    assert (folder / "finished").exists()
