"""Whenever Ctrl-C comes in a fresh folder, and whichever two commands start there together, the
same command ends well afterwards.

`INTERRUPTS=60 PAIRS=20 pytest -m long tests/jobs/test_interrupts.py` runs all of it, in hours.
"""

import os
import random
import signal
import subprocess
import time

import pytest
from mlflow import MlflowClient

from specdec_core.base.uris import sqlite_uri
from tests.commands import QUICK, plan_file, prompts_file, started

pytestmark = pytest.mark.long

INTERRUPTS = int(os.environ.get("INTERRUPTS", 4))
PAIRS = int(os.environ.get("PAIRS", 2))
ENDING = 120.0  # seconds that a command may take to end after Ctrl-C
# The demo, of another pair and sweep than the bundled ones, which take minutes.
DEMO = (
    "import sys; from pathlib import Path; from jobs import demo; from jobs.console import run;"
    "demo.SWEEPS['bundled'] = Path(sys.argv.pop()); run(demo.main)"
)


@pytest.fixture(scope="module")
def commands(tiny_pair_folders, tmp_path_factory):
    """Short ones: two sweeps of different pairs, and the demo of the first pair."""
    folder = tmp_path_factory.mktemp("plans")
    prompts = prompts_file(folder, (f"x{i} = {i}" for i in range(2)))
    target, draft = map(str, (tiny_pair_folders["target"], tiny_pair_folders["draft"]))
    policy = {"kind": "fixed", "max_tokens": [1, 2]}
    plan = QUICK | {
        "prompts": {"source": str(prompts)},
        "max_new_tokens": 8,
        "race": {"seconds": 1},
        "search": [{"drafter": {"kind": "draft_model", "policy": policy}}],
    }
    one, other = (
        str(plan_file(folder, name, pair={"target": large, "drafts": {"draft": small}}, **plan))
        for name, large, small in (("a", target, draft), ("b", draft, target))
    )
    sweep = ["-m", "jobs.sweep", "--config"]
    return {"sweep": [*sweep, one], "other": [*sweep, other], "demo": ["-c", DEMO, one]}


def given(command, home):
    """What a command that ends well has printed."""
    with started(home, *command) as process:
        output = process.communicate()[0]
    assert process.returncode == 0, output
    return output


def ends_well(command, home):
    """Give the command; returns the seconds that it took."""
    begun = time.monotonic()
    assert "champion " in given(command, home)
    (champion,) = MlflowClient(sqlite_uri(home / "mlflow.db")).search_registered_models()
    assert "champion" in champion.aliases
    return time.monotonic() - begun


@pytest.fixture
def home(tmp_path):
    """A fresh folder, of an unusual name."""
    return tmp_path / "what? a%2Fb #é {1}"


@pytest.fixture(scope="module")
def seconds(commands, tmp_path_factory):
    """What each command takes without an interruption."""
    return {
        name: ends_well(commands[name], tmp_path_factory.mktemp(name)) for name in ("sweep", "demo")
    }


@pytest.mark.parametrize("number", range(INTERRUPTS))
def test_a_command_that_was_interrupted_in_a_fresh_folder_ends_well(
    number, commands, seconds, home
):
    name = ("sweep", "demo")[number % 2]
    moment = random.Random(number).uniform(0, seconds[name])
    with started(home, *commands[name]) as process:
        time.sleep(moment)
        os.killpg(process.pid, signal.SIGINT)
        try:
            output = process.communicate(timeout=ENDING)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    print(f"{name} at {moment:.1f} s: {process.returncode}, {output[-400:]}")
    ends_well(commands[name], home)


@pytest.mark.parametrize("number", range(PAIRS))
def test_commands_that_start_together_in_a_fresh_folder_end_well(number, commands, home):
    names = (("sweep", "other"), ("sweep", "sweep"), ("sweep", "demo"))[number % 3]
    with started(home, *commands[names[0]]) as one:
        time.sleep(random.Random(number).uniform(0, 2))
        with started(home, *commands[names[1]]) as another:
            outputs = one.communicate()[0], another.communicate()[0]
    codes = {one.returncode, another.returncode}
    # The same sweep runs once at a time: the later one is refused.
    assert codes == {0} or (codes == {0, 2} and "other" not in names), outputs
    assert not any("Traceback" in output for output in outputs), outputs
    for name in names:
        given(commands[name], home)
