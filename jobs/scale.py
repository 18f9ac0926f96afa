"""Measure how counting scales over nodes, and what a driver keeps up with: `python -m jobs.scale`.

The nodes are Ray nodes of this machine, each with its own scheduler and object store.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.table import Table
from typer import Option

from jobs.console import console, run
from jobs.profile import sizes
from specdec_core.base.errors import UserError

if TYPE_CHECKING:
    from specdec_core.cost import Profile
    from specdec_core.search.observer import Observer
    from specdec_core.search.plan import ResolvedPlan

ENOUGH = 0.9  # of what a part could do at most: it is what holds the rest up

# Memory in MiB: a node's scheduler and agents, an idle trial's process, this process with Ray's
# head, and a process that decodes with the bundled pair.
NODE, IDLE, HEAD, DECODING = 140, 125, 1200, 700
NODES_NICE = 10  # niceness of the nodes that are played here
OBJECTS = 80 << 20  # bytes of a node's object store, the least that Ray takes
# What many nodes on one machine do without: looks at its state, one for each of them, and processes
# that are started before their use is known.
_LIGHT = {
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    # Many processes starting at once on few cores are slow, not lost.
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_health_check_failure_threshold": "40",
}
FORWARDS = {"name": "unit", "target": 1.0, "drafts": {"*": 0.1}}  # rates do not depend on them


def main(
    nodes: Annotated[str, Option(help="Nodes to count on, as 1,2.")] = "1,2",
    slots: Annotated[int, Option(min=1, help="Trials that a node runs at a time.")] = 1,
    trials: Annotated[int, Option(min=1, help="Configurations to count.")] = 24,
    idle: Annotated[
        float | None,
        Option(min=0, help="Seconds that a trial sleeps; unset, it decodes with the bundled pair."),
    ] = None,
    prompts: Annotated[int, Option(min=1, help="Held-out prompts that a trial decodes.")] = 4,
) -> None:
    """Count configurations by the way of every sweep (Tune, folder, MLflow) on 1, 2, … nodes of
    this machine, and show trials a second, the driver's memory, MLflow's rate, and what holds the
    rest up. Run it on an otherwise idle machine."""
    counts = sizes(nodes, "--nodes")
    check_memory(max(counts), slots, idle is not None)
    from dashboards.progress import SweepProgress

    found = []
    for count in counts:
        with SweepProgress(console) as progress:
            found.append(measured(count, slots, trials, idle, prompts, progress))
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("nodes × slots")
    for count in counts:
        table.add_column(f"{count} × {slots}", justify="right")
    for name in found[0]:
        table.add_row(name, *(column[name] for column in found))
    console.print(table)


def check_memory(nodes: int, slots: int, idle: bool) -> None:
    """Raises :class:`UserError` where this machine has not the memory for so many nodes."""
    needed = HEAD + nodes * (NODE + slots * (IDLE if idle else DECODING))
    there = _available()
    if needed > there:
        raise UserError(
            f"--nodes {nodes}: with {slots} slots each they take about {needed / 1024:.1f} GiB of"
            f" memory and {there / 1024:.1f} GiB are free; give fewer"
        )


def measured(
    nodes: int, slots: int, trials: int, idle: float | None, prompts: int, tell: Observer
) -> dict[str, str]:
    """A column of the table. Trials a second do not include starting nodes and loading models."""
    from cluster.sweep.counting import count_all
    from cluster.sweep.idle_trial import IdleTask, IdleTrial
    from cluster.sweep.trial import CountTrial
    from dashboards.tracking import SweepRun
    from specdec_core.prompts.prompt_sets import PromptSet
    from specdec_core.search.folder import SweepFolder
    from specdec_core.search.observer import Observers
    from specdec_core.search.results import SweepResult

    plan, profile = _plan(trials, prompts)
    if idle is None:
        task, trial = _decoding(plan, profile), CountTrial
    else:
        task, trial = IdleTask(idle), IdleTrial
    free, clock = _available(), time.perf_counter()
    with tempfile.TemporaryDirectory() as home, _workspace(home), _cluster(nodes, slots, tell):
        starting = time.perf_counter() - clock
        folder = SweepFolder(Path(home) / "sweeps" / "scale")
        result = SweepResult(
            name="scale",
            started=datetime.now(UTC),
            pair=plan.pair,
            prompts=PromptSet(source="bundled:held_out", count=prompts, digest="0"),
            max_new_tokens=plan.max_new_tokens,
            profile=profile,
        )
        with SweepRun(tell) as tracking, folder.lock(), _Memory() as memory:
            tracking.begun(result, [], folder.path)
            clock, busy, own = time.perf_counter(), time.process_time(), time.thread_time()
            finished: list[float] = []
            heard = _Clock(finished, Observers([tracking, tell]))
            count_all(plan, task, {"CPU": 1}, result, folder, heard, trial)
            seconds, busy = time.perf_counter() - clock, time.process_time() - busy
            own = time.thread_time() - own
            behind = tracking.delivery.left
            clock = time.perf_counter()
            tracking.counted(result)
            more = time.perf_counter() - clock
    assert len(result.trials) == trials, f"{len(result.trials)} of {trials} were counted"
    # The first of each slot loads the models.
    steady = sorted(finished)[min(nodes * slots, trials // 2) :]
    rate = (len(steady) - 1) / max(steady[-1] - steady[0], 1e-9) if len(steady) > 1 else 0.0
    share = rate * idle / (nodes * slots) if idle else None
    load, own = busy / seconds, own / seconds
    delivered = f"{trials / (seconds + more):.1f}" if behind else f"at least {trials / seconds:.1f}"
    return {
        "trials": f"{trials:,}",
        "seconds to start the nodes": f"{starting:.0f}",
        "memory of everything, GiB": f"{(free - memory.least) / 1024:.1f}",
        "seconds to count them": f"{seconds:.1f}",
        "trials a second": f"{rate:.2f}",
        "of what the workers could": "–" if share is None else f"{share:.0%}",
        "driver busy": f"{load:.0%}",
        "of that Tune and the folder": f"{own:.0%}",
        "driver's memory, MiB": f"{memory.before:.0f} → {memory.most:.0f}",
        "MLflow runs a second": delivered,
        "MLflow's seconds behind": f"{more:.1f}",
        "held up by": _bottleneck(share, load, own, behind, trials),
    }


def _bottleneck(share: float | None, load: float, own: float, behind: int, trials: int) -> str:
    """What would have to be faster first."""
    if share is None or share > ENOUGH:
        slow = "workers"
    elif load > ENOUGH:
        slow = "driver: Tune and the folder" if own > load / 2 else "driver: MLflow's client"
    else:
        slow = "starting trials"
    return f"{slow}; MLflow {behind:,} behind" if behind > 0.1 * trials else slow


def _plan(trials: int, prompts: int) -> tuple[ResolvedPlan, Profile]:
    """Confidence thresholds, all different, and forward times that nobody measured."""
    from specdec_core.cost import Hardware
    from specdec_core.search.plan import Plan

    thresholds = [round((i + 1) / (trials + 1), 6) for i in range(trials)]
    policy = {"kind": "confidence", "threshold": thresholds}
    drafter = {"kind": "draft_model", "draft": "small", "policy": policy}
    plan = Plan.model_validate(
        {
            "prompts": {"source": "bundled:held_out", "limit": prompts},
            "search": [{"drafter": drafter}],
        }
    ).resolve()
    if "small" not in plan.pair.drafts:
        raise UserError("the bundled pair has no draft `small`")
    return plan, Hardware.model_validate(FORWARDS).profile(list(plan.pair.drafts))


def _decoding(plan: ResolvedPlan, profile: Profile) -> Any:
    """The prompts, to be decoded."""
    from cluster.sweep.trial import Task
    from specdec_core.engine.engine import Request
    from specdec_core.models.pair import check_pair
    from specdec_core.prompts.prompt_sets import load_prompts

    tokenizer = check_pair(plan.pair)
    found = load_prompts(plan.prompts.source, plan.prompts.limit, tokenizer)
    requests = tuple(
        Request(p.id, tuple(tokenizer(p.text)["input_ids"]), plan.max_new_tokens, seed=i)
        for i, p in enumerate(found)
    )
    return Task(plan.pair, profile, requests, len(requests))


@contextmanager
def _workspace(home: str) -> Iterator[None]:
    before = os.environ.get("SPECDEC_HOME")
    os.environ["SPECDEC_HOME"] = home
    try:
        yield
    finally:
        if before is None:
            del os.environ["SPECDEC_HOME"]
        else:
            os.environ["SPECDEC_HOME"] = before


@contextmanager
def _cluster(nodes: int, slots: int, tell: Observer) -> Iterator[None]:
    """Ray nodes of this machine, and a head that does nothing else; this process is connected."""
    import ray
    from ray.cluster_utils import Cluster

    from cluster.session import QUIET, ray_session

    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        raise UserError("jobs.scale starts its own nodes: unset RAY_ADDRESS")
    for name, value in {**QUIET, **_LIGHT}.items():
        os.environ.setdefault(name, value)
    tell.stage(f"starting {nodes} nodes", nodes)
    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        for _ in range(nodes):
            found.add_node(wait=False, num_cpus=slots, object_store_memory=OBJECTS)
            tell.step()
        found.wait_for_nodes(timeout=60 + 10 * nodes)
        for node in found.worker_nodes:
            for process in chain.from_iterable(node.all_processes.values()):
                _give_way(process.process.pid)
        os.environ["RAY_ADDRESS"] = found.address
        with ray_session():
            yield
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        found.shutdown()


def _give_way(pid: int) -> None:
    """Let this process's driver go before another process, all that it has started and all that
    it will: on a cluster the two share no cores."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), NODES_NICE)
            for child in (thread / "children").read_text().split():
                _give_way(int(child))


class _Clock:
    """Notes when trials finish, and hands everything on."""

    def __init__(self, finished: list[float], then: Any) -> None:
        self.finished, self.then = finished, then

    def trial_finished(self, trial: Any) -> None:
        self.finished.append(time.perf_counter())
        self.then.trial_finished(trial)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.then, name)


def _available() -> float:
    """Memory in MiB that the machine has free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1024


class _Memory:
    """This process's memory in MiB, before the block and at most in it, and the least that was
    free."""

    def __enter__(self) -> _Memory:
        self.before = self.most = self._now()
        self.least = _available()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self.most = max(self.most, self._now())
            self.least = min(self.least, _available())

    @staticmethod
    def _now() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    run(main)
