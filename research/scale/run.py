"""Count configurations on simulated nodes of this machine, and measure the cost."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.sweep.counting import count_all
from cluster.sweep.trial import CountTrial, TrialTask
from research.scale.idle_trial import IdleTask, IdleTrial
from research.scale.memory import MemoryWatch, available
from research.scale.nodes import local_nodes
from research.scale.study import Scaled
from specdec_core.base.errors import UserError
from specdec_core.base.observer import together
from specdec_core.cost import Hardware, Profile
from specdec_core.engine import Request
from specdec_core.models.pair import check_pair
from specdec_core.prompts.conversation import Conversation
from specdec_core.prompts.prompt_sets import PromptSet, load_prompts
from specdec_core.search.folder import SweepFolder
from specdec_core.search.observer import SweepObserver
from specdec_core.search.plan import Plan, ResolvedPlan
from specdec_core.search.results import SweepResult, Trial

FORWARDS = {"name": "unit", "target": 1.0, "drafts": {"*": 0.1}}  # rates do not depend on them


def count_on_nodes(
    nodes: int,
    slots: int,
    trials: int,
    idle: float | None,
    prompts: int,
    progress: SweepObserver,
    log: Callable[[SweepResult], object],
) -> Scaled:
    """Count `trials` configurations on `nodes` nodes that run `slots` trials at a time. A trial
    sleeps `idle` seconds or, unset, decodes `prompts` held-out prompts with the bundled pair.
    `log` writes them to MLflow."""
    plan, profile = _plan(trials, prompts)
    task, trial = _task(plan, profile, idle)
    result = _result(plan, profile, prompts)
    free, clock = available(), time.perf_counter()
    with tempfile.TemporaryDirectory() as home, local_nodes(nodes, slots, progress):
        starting = time.perf_counter() - clock
        folder = SweepFolder(Path(home) / "scale")
        with folder.lock(), MemoryWatch() as memory:
            finished: list[float] = []
            observer = together(SweepObserver, [_Clock(finished), progress])
            clock, driver, thread = time.perf_counter(), time.process_time(), time.thread_time()
            count_all(plan, task, {"CPU": 1}, result, folder, observer, trial)
            counting = time.perf_counter() - clock
            driver, thread = time.process_time() - driver, time.thread_time() - thread
            clock = time.perf_counter()
            log(result)
            logging = time.perf_counter() - clock
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
        main_thread=thread,
        logging=logging,
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
    """Confidence thresholds, all different, and made-up forward times."""
    thresholds = [round((i + 1) / (trials + 1), 6) for i in range(trials)]
    policy = {"kind": "confidence", "threshold": thresholds}
    drafter = {"kind": "draft_model", "draft": "small", "policy": policy}
    source = {"source": "bundled:held_out", "limit": prompts}
    plan = Plan.model_validate({"prompts": source, "search": [{"drafter": drafter}]}).resolve()
    if "small" not in plan.pair.drafts:
        raise UserError("the bundled pair has no draft `small`")
    return plan, Hardware.model_validate(FORWARDS).profile(list(plan.pair.drafts))


def _task(plan: ResolvedPlan, profile: Profile, idle: float | None) -> tuple[Any, type]:
    """The task and class of trials that sleep, or decode the prompts."""
    if idle is not None:
        return IdleTask(idle), IdleTrial
    tokenizer = check_pair(plan.pair)
    prompts = load_prompts(plan.prompts.source, plan.prompts.limit, tokenizer)
    requests = tuple(
        Request(p.id, Conversation(p, tokenizer).tokens(), plan.max_new_tokens, seed=i)
        for i, p in enumerate(prompts)
    )
    return TrialTask(plan.pair, profile, requests, len(requests)), CountTrial


def _result(plan: ResolvedPlan, profile: Profile, prompts: int) -> SweepResult:
    return SweepResult(
        name="scale",
        started=datetime.now(UTC),
        pair=plan.pair,
        prompts=PromptSet(source="bundled:held_out", count=prompts, digest="0"),
        max_new_tokens=plan.max_new_tokens,
        profile=profile,
    )
