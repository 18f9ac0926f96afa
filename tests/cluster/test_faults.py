"""What a sweep loses with a process or a node of its trials: nothing.

Killed drivers are in tests/jobs/test_sweep.py and test_record.py, killed actors of recordings and
heads and full disks beside their modules' tests, tracking servers that are away in
tests/dashboards/test_delivery.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray._private.node import Node
from ray.cluster_utils import Cluster

from specdec_core.config import PairSpec
from specdec_core.results import SweepResult

ROOT = Path(__file__).parents[2]
CONFIGURATIONS = 16
TRIAL = "ResourceTrainable"  # what Tune calls a trial that says what it needs


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head that gives no work a core, and two nodes with one each."""
    # As every command sets them; `ray start` would have them from the README.
    from cluster.ray_session import QUIET

    for name, value in {**QUIET, "SPECDEC_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        for _ in range(2):
            found.add_node(num_cpus=1)
        yield found
    finally:
        found.shutdown()


def actors(node: Node) -> dict[str, int]:
    """The processes of a node's actors by their classes."""
    import psutil  # Ray brings it and puts it on the path

    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    titles = {p.cmdline()[0]: p.pid for p in raylet.children()}
    return {t.removeprefix("ray::").partition(".")[0]: pid for t, pid in titles.items()}


def wait_for(condition: Callable[[], bool], driver: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


SWEEP = """
import sys
from pathlib import Path

from cluster.plan import load_plan
from cluster.sweep import run_sweep

run_sweep(load_plan(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.long
def test_a_sweep_loses_nothing_with_a_killed_actor_and_a_lost_node(
    cluster: Cluster, tiny_spec: PairSpec, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"x{i} = {i}"}) for i in range(12)))
    lengths = list(range(1, CONFIGURATIONS + 1))
    plan = {
        "pair": tiny_spec.model_dump(),
        "prompts": {"source": str(prompts)},
        "max_new_tokens": 96,
        "search": [{"drafter": {"kind": "prompt_lookup", "max_tokens": lengths}}],
        "hardware": {"name": "far away", "target": 0.1, "drafts": {"*": 0.01}},
    }
    config = tmp_path / "sweep.yaml"
    config.write_text(json.dumps(plan))  # JSON is YAML

    def finished() -> int:
        return len(list(tmp_path.glob("sweeps/*/trials/*.json")))

    with subprocess.Popen(
        [sys.executable, "-c", SWEEP, str(config), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as driver:
        wait_for(lambda: finished() >= 2, driver)
        first, second = sorted(cluster.worker_nodes, key=lambda node: "Bench" in actors(node))
        os.kill(actors(first)[TRIAL], signal.SIGKILL)
        killed_at = finished()
        wait_for(lambda: finished() > killed_at + 1 and TRIAL in actors(second), driver)
        lost_at = finished()
        cluster.remove_node(second, allow_graceful=False)
        output = driver.communicate(timeout=120)[0]
    assert driver.returncode == 0, output
    assert lost_at < CONFIGURATIONS, output
    (folder,) = tmp_path.glob("sweeps/*")
    result = SweepResult.load(folder)
    found = [t.configuration.drafter.max_tokens for t in result.trials if t.configuration.drafter]
    assert sorted(found) == lengths
    assert all(trial.counts["requests"] == 12 for trial in result.trials)
