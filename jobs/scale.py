"""Measure how counting scales over nodes, and what a driver keeps up with: `python -m jobs.scale`.

The nodes are Ray nodes of this machine, each with its own scheduler and object store.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.console import console, run
from jobs.options import sizes
from specdec_core.base.errors import UserError
from specdec_core.base.observer import together
from specdec_core.search.observer import SweepObserver

if TYPE_CHECKING:
    from specdec_core.cost import Profile
    from specdec_core.search.plan import ResolvedPlan
    from specdec_core.search.results import SweepResult, Trial
    from specdec_core.studies.scaling import Scaled

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

    # Ray and MLflow take seconds to import.
    from cluster.local_nodes import check_memory
    from dashboards.outputs.console import show
    from dashboards.progress import SweepProgress
    from dashboards.reports.scaling import section

    check_memory(max(counts), slots, idle is not None)
    found = []
    for count in counts:
        with SweepProgress(console) as progress:
            found.append(measured(count, slots, trials, idle, prompts, progress))
    show(console, [section(found)])


def measured(
    nodes: int,
    slots: int,
    trials: int,
    idle: float | None,
    prompts: int,
    observer: SweepObserver,
) -> Scaled:
    """Count on so many nodes, in a workspace of their own."""
    from cluster.local_nodes import local_nodes
    from cluster.sweep.counting import count_all
    from dashboards.tracking.sweep_run import SweepRun
    from specdec_core.base.memory import MemoryWatch, available
    from specdec_core.search.folder import SweepFolder
    from specdec_core.studies.scaling import Scaled

    plan, profile = _plan(trials, prompts)
    task, trial = _task(plan, profile, idle)
    result = _result(plan, profile, prompts)
    free, clock = available(), time.perf_counter()
    with tempfile.TemporaryDirectory() as home, _home(home), local_nodes(nodes, slots, observer):
        starting = time.perf_counter() - clock
        folder = SweepFolder(Path(home) / "sweeps" / "scale")
        with SweepRun(observer) as tracking, folder.lock(), MemoryWatch() as memory:
            tracking.begun(result, [], folder.path)
            finished: list[float] = []
            all_of_them = together(SweepObserver, [_Clock(finished), tracking, observer])
            clock, driver, own = time.perf_counter(), time.process_time(), time.thread_time()
            count_all(plan, task, {"CPU": 1}, result, folder, all_of_them, trial)
            counting = time.perf_counter() - clock
            driver, own = time.process_time() - driver, time.thread_time() - own
            behind = tracking.delivery.left
            clock = time.perf_counter()
            tracking.counted(result)
            delivering = time.perf_counter() - clock
    assert len(result.trials) == trials, f"{len(result.trials)} of {trials} were counted"
    return Scaled(
        nodes=nodes,
        slots=slots,
        trials=trials,
        idle=idle,
        starting=starting,
        counting=counting,
        finished=finished,
        driver=driver,
        main_thread=own,
        behind=behind,
        delivering=delivering,
        free=free,
        memory=memory,
    )


class _Clock(SweepObserver):
    """Notes when trials finish."""

    def __init__(self, finished: list[float]) -> None:
        self.finished = finished

    def trial_finished(self, trial: Trial) -> None:
        self.finished.append(time.perf_counter())


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


def _task(plan: ResolvedPlan, profile: Profile, idle: float | None) -> tuple[Any, type]:
    """What a trial does: sleep, or decode the prompts."""
    from cluster.sweep.idle_trial import IdleTask, IdleTrial
    from cluster.sweep.trial import CountTrial, Task
    from specdec_core.engine.engine import Request
    from specdec_core.models.pair import check_pair
    from specdec_core.prompts.prompt_sets import load_prompts

    if idle is not None:
        return IdleTask(idle), IdleTrial
    tokenizer = check_pair(plan.pair)
    found = load_prompts(plan.prompts.source, plan.prompts.limit, tokenizer)
    requests = tuple(
        Request(p.id, tuple(tokenizer(p.text)["input_ids"]), plan.max_new_tokens, seed=i)
        for i, p in enumerate(found)
    )
    return Task(plan.pair, profile, requests, len(requests)), CountTrial


def _result(plan: ResolvedPlan, profile: Profile, prompts: int) -> SweepResult:
    from specdec_core.prompts.prompt_sets import PromptSet
    from specdec_core.search.results import SweepResult

    return SweepResult(
        name="scale",
        started=datetime.now(UTC),
        pair=plan.pair,
        prompts=PromptSet(source="bundled:held_out", count=prompts, digest="0"),
        max_new_tokens=plan.max_new_tokens,
        profile=profile,
    )


@contextmanager
def _home(home: str) -> Iterator[None]:
    """The workspace there, for a while."""
    before = os.environ.get("SPECDEC_HOME")
    os.environ["SPECDEC_HOME"] = home
    try:
        yield
    finally:
        if before is None:
            del os.environ["SPECDEC_HOME"]
        else:
            os.environ["SPECDEC_HOME"] = before


if __name__ == "__main__":
    run(main)
