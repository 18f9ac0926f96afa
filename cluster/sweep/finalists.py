"""The finalists of a sweep: chosen by estimate, timed alone in turns, and the champion of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import pandas as pd
import ray

from cluster.session import get
from cluster.sweep.timing import InterleavedTimes
from cluster.sweep.trial import assess
from specdec_core.config import Configuration
from specdec_core.engine import Request
from specdec_core.search.folder import SweepFolder
from specdec_core.search.observer import SweepObserver
from specdec_core.search.plan import ResolvedPlan
from specdec_core.search.results import METRIC, SweepResult, Timing, Trial, by_estimate
from specdec_core.search.round_tables import Rounds
from specdec_core.tokens.statistics import Counts, rounds_frame

NEAR_TIES = 0.05  # what they can change of a configuration's forwards, at most


def time_finalists(
    plan: ResolvedPlan,
    bench: ray.actor.ActorHandle,
    requests: Sequence[Request],
    result: SweepResult,
    folder: SweepFolder,
    tell: SweepObserver,
) -> dict[str, pd.DataFrame]:
    """Time the finalists and count autoregressive decoding; fills `result.timings`, `.champion`
    and, where no recording tells them, `.oracles`. Returns the rounds of finalists that had only
    been replayed."""
    baseline = plan.autoregressive
    finalists = _finalists(plan, result, tell)
    contestants = [baseline, *finalists]
    watch = _take_times(plan, bench, contestants, requests, tell)
    known = {trial.id for trial in result.trials}
    for uncounted in (c for c in contestants if c.id not in known):
        generations = watch.generations[uncounted.id]
        trial = assess(uncounted, generations, result.profile)
        tell.trial_finished(trial)
        folder.add_trial(trial, Rounds.of(rounds_frame(generations, config_id=trial.id)))
        result.trials.append(trial)
    result.autoregressive = watch.timing(baseline, baseline)
    result.timings = [watch.timing(finalist, baseline) for finalist in finalists]
    result.champion = choose_champion(contestants, watch, result)
    split = plan.cluster is not None and plan.cluster.target.devices > 1
    if plan.sampling.greedy and not result.oracles and not split:  # it takes a whole target
        tell.stage("oracle")
        outputs = watch.outputs(baseline)
        result.oracles = get(bench.oracles.remote(result.profile, requests, outputs))
    return _compare(watch, finalists, result, tell)


def _finalists(plan: ResolvedPlan, result: SweepResult, tell: SweepObserver) -> list[Configuration]:
    """What is timed: the best that may win, and every draft beside the target."""
    chosen = choose_finalists(result.trials, plan.finalists, plan.allow_lossy)
    lossy = {m for t in result.trials for m in t.configuration.lossy_methods}
    if kept_out := sorted(lossy - set(plan.allow_lossy)):
        names = ", ".join(kept_out)
        tell.warned(f"{names}: lossy, so counted but never the best (allow_lossy: [{names}])")
    beside = [c for c in plan.configurations or () if c.asynchronous]
    return [*(trial.configuration for trial in chosen), *beside]


def _take_times(
    plan: ResolvedPlan,
    bench: ray.actor.ActorHandle,
    contestants: Sequence[Configuration],
    requests: Sequence[Request],
    tell: SweepObserver,
) -> InterleavedTimes:
    """Decode every prompt by all contestants in turn, `plan.repeats` times."""
    steps = plan.repeats * len(requests)
    tell.stage(f"timing {len(contestants) - 1} finalists alone", steps)
    get(bench.warm_up.remote(contestants, requests[0]))
    watch = InterleavedTimes()
    for repeat in range(plan.repeats):
        get(bench.forget.remote())  # every repeat does the same work
        for request in requests:
            watch.take(bench, contestants, request, repeat)
            tell.step()
    return watch


def _forwards(counts: Counts) -> int:
    return counts.n_draft + counts.n_target


def _compare(
    watch: InterleavedTimes,
    finalists: Sequence[Configuration],
    result: SweepResult,
    tell: SweepObserver,
) -> dict[str, pd.DataFrame]:
    """Whether replayed finalists, decoded now, had the counts that the recording told; fills
    `result.replay`. Returns their rounds."""
    replayed = [c for c in finalists if result.trial(c.id).replayed]
    told = {c: Counts(**result.trial(c.id).counts) for c in replayed}
    live = {c: Counts.of(watch.generations[c.id]) for c in replayed}
    deviations = {
        c: abs(_forwards(live[c]) / max(_forwards(told[c]), 1) - 1)
        for c in replayed
        if live[c] != told[c]
    }
    if result.replay is not None:
        result.replay.checked = len(replayed)
        result.replay.equal = len(replayed) - len(deviations)
        result.replay.deviation = max(deviations.values(), default=0.0)
    # Near-ties between tokens flip where less than float32 is computed with.
    exact = {result.profile.target_dtype, result.profile.draft_dtype} == {"float32"}
    if doubtful := [c for c, d in deviations.items() if exact or d > NEAR_TIES]:
        tell.warned(
            f"replayed and live counts differ for {', '.join(c.label for c in doubtful)}; is the "
            "recording of these models and this machine?"
        )
    return {c.id: rounds_frame(watch.generations[c.id], config_id=c.id) for c in replayed}


def choose_finalists(
    trials: Iterable[Trial], count: int, allow_lossy: Collection[str] = ()
) -> list[Trial]:
    """The best trials by estimated speedup that may win, with the best of every family first in
    line, so that the estimate alone does not decide between kinds of drafting. Best first."""
    may_win = [t for t in trials if t.may_win(allow_lossy)]
    ranked = by_estimate(t for t in may_win if t.configuration.drafter is not None)
    leaders: dict[str, Trial] = {}
    for trial in ranked:
        leaders.setdefault(trial.configuration.family, trial)
    chosen = {trial.id: trial for trial in (*leaders.values(), *ranked)}
    return by_estimate([*chosen.values()][:count])


def choose_champion(
    contestants: Sequence[Configuration], watch: InterleavedTimes, result: SweepResult
) -> str:
    """The fastest contestant, but autoregressive decoding, which comes first, where nothing is
    shown to beat it. Among those that cannot be told from the fastest, the one whose counts
    promise most: counts carry no noise, but for those of drafts beside the target, of which the
    estimate knows nothing. Marks in `result` who is tied with the champion."""
    baseline = contestants[0]

    def speedup(configuration: Configuration) -> float:
        return watch.timing(configuration, baseline).speedup

    def tied(one: Configuration, other: Configuration) -> bool:
        return one == other or watch.compare(one, other).tied

    fastest = max(contestants, key=speedup)
    equals = [c for c in contestants if tied(fastest, c)]
    if baseline in equals:
        champion = baseline
    elif fastest.asynchronous:
        champion = fastest
    else:
        counted = [c for c in equals if not c.asynchronous]
        champion = max(counted, key=lambda c: result.trial(c.id).metrics[METRIC])
    timed: list[Timing] = [t for t in (result.autoregressive, *result.timings) if t is not None]
    for timing in timed:
        other = result.trial(timing.config_id).configuration
        timing.tied_with_champion = other != champion and tied(champion, other)
    return champion.id
