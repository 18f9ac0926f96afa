"""The finalists of a sweep: chosen by estimate, timed alone interleaved; and the champion."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from statistics import median

import pandas as pd

from cluster.session import Remote
from cluster.sweep.racing import FinalistRace
from cluster.sweep.state import SweepState
from cluster.sweep.trial import assess
from specdec_core.config import Configuration
from specdec_core.engine import Request
from specdec_core.search.estimates import correct, corrected
from specdec_core.search.results import Trial, by_estimate
from specdec_core.tokens.statistics import Counts, rounds_frame

NEAR_TIES = 0.05  # the largest share of a configuration's forwards that they can change


def time_finalists(
    sweep: SweepState,
    measuring: Remote,
    requests: Sequence[Request],
    further: Sequence[Request],
) -> dict[str, pd.DataFrame]:
    """Time the finalists on the prompts, and where the choice is not clear on `further` ones; count
    autoregressive decoding. Fills the result's `.timings`, `.race` and `.champion`. Returns the
    rounds of finalists that had only been replayed."""
    plan, result = sweep.plan, sweep.result
    contestants = [plan.autoregressive, *_finalists(sweep)]
    race = FinalistRace(contestants, requests, further, measuring, plan.race)

    def challengers(taken: Mapping[str, float]) -> list[Configuration]:
        _count(race, sweep)
        return choose_challengers(result.trials, taken, plan.allow_lossy)

    result.race = summary = race.run(challengers, plan.repeats, sweep.observer)
    result.champion = summary.champion
    _count(race, sweep)
    correct(result.trials, race.taken())
    result.autoregressive, *result.timings = map(race.timing, race.contestants)
    for timing in (result.autoregressive, *result.timings):
        tied = timing.config_id in summary.in_question
        timing.tied_with_champion = tied and timing.config_id != summary.champion
    return _compare(race, sweep)


def _finalists(sweep: SweepState) -> list[Configuration]:
    """The configurations to time: the best that may win."""
    plan, trials = sweep.plan, sweep.result.trials
    chosen = choose_finalists(trials, plan.finalists, plan.allow_lossy)
    lossy = {m for t in trials for m in t.configuration.lossy_methods}
    if kept_out := sorted(lossy - set(plan.allow_lossy)):
        names = ", ".join(kept_out)
        sweep.observer.warned(
            f"{names}: lossy, so counted but never the best (allow_lossy: [{names}])"
        )
    return [trial.configuration for trial in chosen]


def _count(race: FinalistRace, sweep: SweepState) -> None:
    """Count the configurations that only the race decodes: autoregressive decoding."""
    counted = {trial.id for trial in sweep.result.trials}
    for uncounted in (c for c in race.contestants if c.id not in counted):
        generations = race.generations(uncounted)
        trial = assess(uncounted, generations, sweep.result.profile)
        rounds = rounds_frame(generations, config_id=trial.id)
        sweep.add(trial, rounds.to_parquet(index=False))


def _forwards(counts: Counts) -> int:
    return counts.n_draft + counts.n_target


def _compare(race: FinalistRace, sweep: SweepState) -> dict[str, pd.DataFrame]:
    """Compare the live counts of replayed finalists with their replayed counts; fills the result's
    `.replay`. Returns their rounds."""
    result = sweep.result
    replayed = [c for c in race.contestants if result.trial(c.id).replayed]
    expected = {c: Counts(**result.trial(c.id).counts) for c in replayed}
    live = {c: Counts.of(race.generations(c)) for c in replayed}
    deviations = {
        c: abs(_forwards(live[c]) / max(_forwards(expected[c]), 1) - 1)
        for c in replayed
        if live[c] != expected[c]
    }
    if result.replay is not None:
        result.replay.checked = len(replayed)
        result.replay.equal = len(replayed) - len(deviations)
        result.replay.deviation = max(deviations.values(), default=0.0)
    # Near-ties between tokens flip in less than float32.
    exact = {result.profile.target_dtype, result.profile.draft_dtype} == {"float32"}
    if doubtful := [c for c, d in deviations.items() if exact or d > NEAR_TIES]:
        sweep.observer.warned(
            f"replayed and live counts differ for {', '.join(c.label for c in doubtful)}; is the "
            "recording of these models and this machine?"
        )
    return {c.id: rounds_frame(race.generations(c), config_id=c.id) for c in replayed}


def choose_finalists(
    trials: Iterable[Trial], count: int, allow_lossy: Collection[str] = ()
) -> list[Trial]:
    """The best trials by estimated speedup that may win, the fastest first. The best trial of every
    family comes before further trials of a family, so that the estimate alone does not decide
    between kinds of drafting."""
    may_win = [t for t in trials if t.may_win(allow_lossy)]
    ranked = by_estimate(t for t in may_win if t.configuration.drafter is not None)
    leaders: dict[str, Trial] = {}
    for trial in ranked:
        leaders.setdefault(trial.configuration.family, trial)
    chosen = {trial.id: trial for trial in (*leaders.values(), *ranked)}
    return by_estimate([*chosen.values()][:count])


def choose_challengers(
    trials: Sequence[Trial], taken: Mapping[str, float], allow_lossy: Collection[str] = ()
) -> list[Configuration]:
    """The configurations that may win, were not timed and may be faster than all timed ones: by
    estimates corrected by the times that were `taken` (:mod:`specdec_core.search.estimates`), less
    their typical error. The likeliest first."""
    expected = corrected(trials, taken)
    errors = [abs(taken[each] / expected[each] - 1) for each in taken if each in expected]
    within = min(taken.values()) * (1 + median(errors or [0.0]))
    promising = [
        trial
        for trial in trials
        if trial.id not in taken
        and trial.may_win(allow_lossy)
        and expected.get(trial.id, inf) < within
    ]
    promising.sort(key=lambda trial: expected[trial.id])
    return [trial.configuration for trial in promising]
