"""What a sweep loses with a process or a node of its trials: nothing.

Killed drivers are in tests/jobs/test_sweep.py and test_record.py, killed actors of recordings and
heads and full disks beside their modules' tests, tracking servers that are away in
tests/dashboards/test_delivery.py.
"""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from specdec_core.search.results import SweepResult
from tests.cluster.clusters import running_cluster
from tests.commands import ROOT, plan_file, prompts_file, wait_until
from tests.registered import runs_in

CONFIGURATIONS = 16
TRIAL = "ResourceTrainable"  # what Tune calls a trial that says what it needs


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A head that gives no work a core, and two nodes with one each."""
    # As every command sets them; `ray start` would have them from the README.
    from cluster.session import QUIET

    for name, value in {**QUIET, "SPECDEC_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with running_cluster(2, num_cpus=0) as found:
        yield found


def actors(node):
    """The processes of a node's actors by their classes."""
    import psutil  # Ray brings it and puts it on the path

    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    found = {}
    for process in raylet.children():
        with suppress(psutil.Error, IndexError):  # it has just ended
            title = process.cmdline()[0]
            found[title.removeprefix("ray::").partition(".")[0]] = process.pid
    return found


def wait_for(condition, driver):
    wait_until(lambda: driver.poll() is not None or condition(), 240)
    assert driver.poll() is None, driver.communicate()[0]


SWEEP = """
import sys
from pathlib import Path

from specdec_core.search.plan import load_plan
from cluster.sweep.run import run_sweep
from dashboards.tracking.sweep_run import SweepRun

tracking = SweepRun()
result, folder = run_sweep(load_plan(sys.argv[1]), Path(sys.argv[2]), observer=tracking)
tracking.finish(result, folder.path)
"""


@pytest.mark.long
def test_a_sweep_loses_nothing_with_a_killed_actor_and_a_lost_node(cluster, tiny_spec, tmp_path):
    prompts = prompts_file(tmp_path, (f"x{i} = {i}" for i in range(12)))
    lengths = list(range(1, CONFIGURATIONS + 1))
    plan = {
        "pair": tiny_spec.model_dump(mode="json"),
        "prompts": {"source": str(prompts)},
        "max_new_tokens": 96,
        "search": [{"drafter": {"kind": "prompt_lookup", "max_tokens": lengths}}],
        "profile": {"device": "far away", "target": 0.1, "drafts": {"*": 0.01}},
    }
    config = plan_file(tmp_path, **plan)

    def times():
        return {f: f.stat().st_mtime_ns for f in tmp_path.glob("sweeps/*/trials/*.json")}

    def finished():
        return len(times())

    with subprocess.Popen(
        [sys.executable, "-c", SWEEP, str(config), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as driver:
        wait_for(lambda: finished() >= 2, driver)
        first, second = sorted(
            cluster.worker_nodes, key=lambda node: "MeasuringProcess" in actors(node)
        )
        os.kill(actors(first)[TRIAL], signal.SIGKILL)
        killed_at = finished()
        wait_for(lambda: finished() > killed_at + 1 and TRIAL in actors(second), driver)
        before = times()
        cluster.remove_node(second, allow_graceful=False)
        output = driver.communicate(timeout=120)[0]
    assert driver.returncode == 0, output
    assert len(before) < CONFIGURATIONS, output
    assert times().items() >= before.items()  # nothing that was finished was counted again
    (folder,) = tmp_path.glob("sweeps/*")
    result = SweepResult.load(folder)
    found = [t.configuration.drafter.max_tokens for t in result.trials if t.configuration.drafter]
    assert sorted(found) == lengths
    assert all(trial.counts["requests"] == 12 for trial in result.trials)
    _, [parent], nested = runs_in(tmp_path)
    assert {run.info.status for run in (parent, *nested)} == {"FINISHED"}
    logged = sorted(run.data.tags["config_id"] for run in nested)
    assert logged == sorted(trial.id for trial in result.trials)


CHECK = """
import sys

import ray

from cluster.session import check_nodes, ray_session
from jobs.console import run
from specdec_core.config import PairSpec

def main() -> None:
    with ray_session():
        check_nodes(PairSpec(target="~/target", drafts={}))
        print("fits")

run(main)
"""


@pytest.mark.long
def test_a_folder_that_a_node_does_not_have_is_named_before_anything_is_loaded(
    cluster, tmp_path, monkeypatch
):
    token = Path("~/.ray/auth_token").expanduser()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))  # with another home, too
    homes = [tmp_path / "here", tmp_path / "there"]
    (homes[0] / "target").mkdir(parents=True)
    homes[1].mkdir()

    def check():
        environment = {**os.environ, "RAY_ADDRESS": cluster.address, "HOME": str(homes[0])}
        command = [sys.executable, "-c", CHECK]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    for node in list(cluster.worker_nodes):
        cluster.remove_node(node)
    cluster.add_node(num_cpus=1, env_vars={"HOME": str(homes[1])})
    done = check()
    assert done.returncode == 2, done.stderr
    assert re.search(r"^error: ~/target: not on the cluster's node [\d.]+; give", done.stderr)
    (homes[1] / "target").mkdir()
    done = check()
    assert (done.returncode, done.stdout.strip()) == (0, "fits"), done.stderr
