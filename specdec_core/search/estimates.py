"""Estimates corrected by what was timed.

A profile knows the forwards and what drafting chains add to them. What else a kind of drafting does
between forwards (searching texts, building trees, keeping tables) shows where configurations of it
are timed. With estimates e, rounds r and times t,

    t̂ᵢ = g · eᵢ + o · rᵢ,    g = t_a / e_a,    o = the mean of (tⱼ − g · eⱼ) / rⱼ over timed j ≠ i

where a is autoregressive decoding, which shows how fast the machine is during the timing. The j are
the timed configurations of i's family and draft, or else of its family, or else all that draft in
the same process. A configuration's own time never enters its estimate, so that the errors of timed
configurations show the error of the rest. Where o is less than 0, a tenth of g · eᵢ is left at
least.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from specdec_core.search.results import METRIC, SECONDS, Trial

LEAST = 0.1  # of the seconds by the profile are left at least


def corrected(trials: Sequence[Trial], taken: Mapping[str, float]) -> dict[str, float]:
    """Seconds that finished trials with a drafter are expected to take, by id, given what those
    timed have `taken` for the same prompts. Empty unless autoregressive decoding is among these."""
    alone = _alone(trials, taken)
    if alone is None:
        return {}
    speed = taken[alone.id] / alone.metrics[SECONDS]
    drafting = [t for t in trials if t.configuration.drafter is not None and _counted(t)]
    forwards = {t.id: speed * t.metrics[SECONDS] for t in drafting}
    timed = [t for t in drafting if t.id in taken]
    overheads = {t.id: (taken[t.id] - forwards[t.id]) / t.counts["n_target"] for t in timed}
    expected = {}
    for trial in drafting:
        shown = [overheads[t.id] for t in _relatives(trial, timed)]
        seconds = forwards[trial.id] + trial.counts["n_target"] * fmean(shown or [0.0])
        expected[trial.id] = max(seconds, LEAST * forwards[trial.id])
    return expected


def correct(trials: Sequence[Trial], taken: Mapping[str, float]) -> None:
    """Let the estimates of `trials` be the corrected ones."""
    alone, expected = _alone(trials, taken), corrected(trials, taken)
    for trial in trials:
        if alone is not None and trial.id in expected:
            seconds = expected[trial.id]
            speedup = taken[alone.id] / alone.counts["n"] * trial.counts["n"] / seconds
            trial.metrics |= {SECONDS: seconds, METRIC: speedup}


def _alone(trials: Iterable[Trial], taken: Mapping[str, float]) -> Trial | None:
    timed = (t for t in trials if t.id in taken and _counted(t))
    return next((t for t in timed if t.configuration.drafter is None), None)


def _counted(trial: Trial) -> bool:
    """Whether it was counted in full."""
    return trial.finished and trial.counts["n_target"] > 0


def _relatives(trial: Trial, timed: Iterable[Trial]) -> list[Trial]:
    """Those timed, without the trial itself, that resemble it most."""
    ours = trial.configuration
    alike = (t for t in timed if t.configuration.asynchronous == ours.asynchronous)
    others = [t for t in alike if t.id != trial.id]
    family = [t for t in others if t.configuration.family == ours.family]
    return [t for t in family if t.configuration.draft == ours.draft] or family or others
