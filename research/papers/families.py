"""Length policies replayed on a recording, and the best of each family (SpecDec++, Table 1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from research.frames import Rows, framed
from specdec_core.config import Configuration
from specdec_core.cost import Profile
from specdec_core.recordings.replay import Replay
from specdec_core.search.results import METRIC, ORACLE, SECONDS, Trial, by_estimate

FIXED = "fixed"
RATES = ("discard_rate", "verification_rate", "mat", "acceptance_rate")


def replay_trials(
    replay: Replay, configurations: Iterable[Configuration], profile: Profile
) -> list[Trial]:
    """A trial for each of `configurations` that can be replayed."""
    context = replay.recording.prompts.context
    return [
        Trial.of(configuration, replay.run(configuration).counts, profile, context, replayed=True)
        for configuration in configurations
        if replay.can(configuration)
    ]


@framed
def best_of_families(recording: str, trials: Sequence[Trial]) -> Rows:
    """One row a draft and family: its fastest configuration with `latency_ms`, `speedup`,
    `over_fixed` (the speedup over the best fixed K with the same draft, less 1), `of_oracle` (the
    share of the oracle's speedup with that draft), and :data:`RATES`. NaN where there is no fixed
    K or no oracle. Families are in the order of their fastest."""
    families: dict[tuple[str | None, str], list[Trial]] = {}
    for trial in by_estimate(trials):
        key = trial.configuration.draft, trial.configuration.family
        families.setdefault(key, []).append(trial)
    for (draft, family), tried in sorted(families.items(), key=lambda item: item[0][0] or ""):
        best = tried[0]
        yield {
            "recording": recording,
            "draft": draft or "",
            "family": family,
            "configuration": _label(best.configuration),
            "config_id": best.id,
            "tried": len(tried),
            "latency_ms": 1e3 * best.metrics[SECONDS] / max(best.counts["n"], 1),
            "speedup": best.metrics[METRIC],
            "over_fixed": _gain(best, families.get((draft, FIXED))) - 1,
            "of_oracle": _gain(best, families.get((draft, ORACLE))),
            **{name: best.metrics[name] for name in RATES},
        }


def _gain(trial: Trial, others: list[Trial] | None) -> float:
    return trial.metrics[METRIC] / others[0].metrics[METRIC] if others else float("nan")


def _label(configuration: Configuration) -> str:
    """The label without draft and sampling."""
    drafter = configuration.drafter
    if drafter is None:
        return configuration.family
    policies = drafter.policies
    return policies[0][1].label if policies else drafter.label
