"""Which configurations of a sweep are the fastest, and which are worth comparing in detail."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdec_core.drafting.policies.heuristic import HeuristicSettings
from specdec_core.search.results import METRIC, ORACLE, SweepResult, Timing, Trial


@dataclass(frozen=True)
class Speedup:
    """Over autoregressive decoding; without an interval it is an estimate from the profile."""

    value: float
    timing: Timing | None = None


def speedup(result: SweepResult, trial: Trial) -> Speedup:
    """Measured where the configuration was timed, estimated elsewhere; NaN when neither."""
    config_id = trial.id  # computed once: it is a hash
    timing = next((t for t in result.timings if t.config_id == config_id), None)
    if timing is not None:
        return Speedup(timing.speedup, timing)
    if trial.configuration.drafter is None:
        return Speedup(1.0, result.autoregressive)
    return Speedup(trial.metrics.get(METRIC, math.nan))


def family(trial: Trial) -> str:
    """The family by which figures colour a configuration. A heuristic that keeps its length from
    one request to the next is a separate family."""
    policy = getattr(trial.configuration.drafter, "policy", None)
    if isinstance(policy, HeuristicSettings) and not policy.transient:
        return "lasting_heuristic"
    return trial.configuration.family


def drafting(result: SweepResult) -> list[Trial]:
    """Trials that draft, without the oracle, which only a replay can follow."""
    return [
        t
        for t in result.trials
        if t.configuration.drafter is not None and t.configuration.family != ORACLE
    ]


def place(result: SweepResult, trial: Trial) -> tuple[bool, bool, float]:
    """What trials are ordered by: the champion, then those timed, then by estimate; fastest
    first."""
    gain = speedup(result, trial)
    value = -math.inf if math.isnan(gain.value) else gain.value
    return trial.id != result.champion, gain.timing is None, -value


def ranked(result: SweepResult) -> list[Trial]:
    """Trials with a drafter, in order."""
    return sorted(drafting(result), key=lambda trial: place(result, trial))


def champion(result: SweepResult) -> Trial | None:
    """The champion, unless there is none yet or it is autoregressive decoding."""
    if result.champion is None:
        return None
    return next((t for t in drafting(result) if t.id == result.champion), None)


def draft_of(result: SweepResult, trial: Trial) -> str | None:
    """The name of the draft model, the first of several; None for a drafter that runs none."""
    return trial.configuration.draft_of(result.pair.drafts)


def leaders(result: SweepResult) -> list[Trial]:
    """The fastest of each family, fastest first."""
    first: dict[str, Trial] = {}
    for trial in ranked(result):
        first.setdefault(family(trial), trial)
    return list(first.values())


def foremost(result: SweepResult, count: int) -> list[Trial]:
    """At most `count`: those timed, the fastest of each family, and then the fastest; in order."""
    order = ranked(result)
    timed = {t.config_id for t in result.timings}
    leading = [*(t for t in order if t.id in timed), *leaders(result), *order]
    chosen = set(list(dict.fromkeys(t.id for t in leading))[:count])
    return [t for t in order if t.id in chosen]
