"""Length policies compared on recordings: the papers' main table, and how well a configuration that
is chosen on one set of prompts does on another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from research.policies.judging import judging_prompts, prompt_seconds
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.cost import Profile
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.measure.comparison import ratio_columns
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.search.plan import load_plan
from specdec_core.search.replaying import find_named
from specdec_core.search.results import METRIC, ORACLE, SECONDS, Trial, by_estimate
from specdec_core.tokens.statistics import paired_ratio

FIXED = "fixed"
PRODUCT = "confidence_product"
ADAPTIVE = "any adaptive"  # a family of all policies that decide anew in every round


@dataclass(frozen=True)
class ComparedPolicy:
    """The trials replayed on one recording."""

    name: str
    trials: list[Trial]
    tokens: Sequence[np.ndarray] = ()  # of the prompts' first turns
    seconds: Mapping[str, np.ndarray] = field(default_factory=dict)  # trial -> of each prompt

    def latency(self, trial: Trial) -> float:
        """Modelled seconds a token (SpecDec++, Eq. 3.1 over N)."""
        return trial.metrics[SECONDS] / max(trial.counts["n"], 1)

    def families(self) -> dict[tuple[str | None, str], list[Trial]]:
        """The trials by draft and family, the fastest first in each, families by their fastest."""
        families: dict[tuple[str | None, str], list[Trial]] = {}
        for trial in by_estimate(self.trials):
            key = trial.configuration.draft, trial.configuration.family
            families.setdefault(key, []).append(trial)
        return families


def open_recordings(names: Iterable[str], home: Path) -> dict[str, Recording]:
    """Recordings, folders or names in the workspace `home`, by their prompts. Raises
    :class:`UserError` unless they are different ones of the same models."""
    opened: dict[str, Recording] = {}
    for name in names:
        recording = find_named(name, home, drawn=True)
        first = next(iter(opened.values()), recording)
        if recording.header.fingerprints != first.header.fingerprints:
            raise UserError(f"{recording.folder} and {first.folder}: of different models")
        if any(recording.folder.samefile(other.folder) for other in opened.values()):
            raise UserError(f"--traces {name}: it was given already")
        label = Path(recording.header.prompts.source).stem.removeprefix("bundled:")
        if label in opened:
            label = f"{label} {recording.folder.resolve().name[-8:]}"
        opened[label] = recording
    return opened


def searched(search: Path, recording: Recording) -> list[Configuration]:
    """The configurations of the sweep file `search`, for the recorded pair and settings."""
    header = recording.header
    plan = load_plan(
        search,
        pair=header.pair.model_dump(),
        sampling=header.sampling.model_dump(),
        max_new_tokens=header.max_new_tokens,
    )
    if plan.configurations is None:
        raise UserError(f"{search}: method: optuna chooses as it goes; give a grid or random")
    return list(plan.configurations)


def replay_search(
    name: str,
    replay: Replay,
    configurations: Sequence[Configuration],
    profile: Profile,
    observer: Observer | None = None,
) -> ComparedPolicy:
    """Replay `configurations`; those that cannot be replayed are left out with a warning. Raises
    :class:`UserError` where none can."""
    observer = observer or Observer()
    replayable = [configuration for configuration in configurations if replay.can(configuration)]
    if left_out := len(configurations) - len(replayable):
        observer.warned(f"{name} does not tell {left_out} configurations")
    if not replayable:
        raise UserError(f"{replay.recording.folder}: tells none of the search's configurations")
    observer.stage(f"replaying {name}", len(replayable))
    prompts = replay.recording.prompts
    trials, seconds = [], {}
    for configuration in replayable:
        rounds = replay.run(configuration)
        trial = Trial.of(
            configuration,
            rounds.counts,
            profile,
            prompts.context,
            replayed=True,
            by_arm=rounds.counts_by_arm().items(),
        )
        trials.append(trial)
        seconds[trial.id] = prompt_seconds(rounds, profile, configuration, prompts.context)
        observer.step()
    return ComparedPolicy(name, trials, prompts.first_turns, seconds)


def best_of_families(sets: list[ComparedPolicy]) -> pd.DataFrame:
    """One row a recording, draft and family: its fastest configuration with `latency_ms`,
    `speedup`, `over_fixed` (the speedup over the best fixed K with the same draft, less 1),
    `of_oracle` (the share of the oracle's speedup with that draft), the rates, and MAT. NaN where
    there is no fixed K or no oracle."""
    rates = ("discard_rate", "verification_rate", "mat", "acceptance_rate")
    rows = []
    for compared in sets:
        families = compared.families()
        # Families are in the order of their fastest; drafts come in the order of their names.
        for (draft, family), trials in sorted(families.items(), key=lambda item: item[0][0] or ""):
            best = trials[0]
            rows.append(
                {
                    "recording": compared.name,
                    "draft": draft or "",
                    "family": family,
                    "configuration": _label(best.configuration),
                    "config_id": best.id,
                    "tried": len(trials),
                    "latency_ms": 1e3 * compared.latency(best),
                    "speedup": best.metrics[METRIC],
                    "over_fixed": _gain(best, families.get((draft, FIXED))) - 1,
                    "of_oracle": _gain(best, families.get((draft, ORACLE))),
                    **{name: best.metrics[name] for name in rates},
                }
            )
    return pd.DataFrame(rows)


def transfers(sets: list[ComparedPolicy]) -> pd.DataFrame:
    """One row a draft, family, recording `chosen_on` and recording `used_on`: how much slower the
    family's best configuration on `chosen_on` is on `used_on` than the best there (`loss`, in
    modelled latency: 0.01 is 1 %). Only trials replayed on both count. The family "any adaptive"
    is the best of all that adapt."""
    rows = []
    for chosen in sets:
        for used in sets:
            on_used = {_key(trial): trial for trial in used.trials}
            on_both = [trial for trial in chosen.trials if _key(trial) in on_used]
            for (draft, family), trials in _pools(on_both).items():
                best = by_estimate(trials)[0]
                least = min(used.latency(on_used[_key(trial)]) for trial in trials)
                rows.append(
                    {
                        "draft": draft or "",
                        "family": family,
                        "chosen_on": chosen.name,
                        "used_on": used.name,
                        "configuration": _label(best.configuration),
                        "loss": used.latency(on_used[_key(best)]) / least - 1,
                    }
                )
    return pd.DataFrame(rows)


def against_product(compared: ComparedPolicy) -> pd.DataFrame:
    """Whether any policy beats the confidence product: one row a draft, family and head, each with
    the configuration that is fastest on some of the prompts, reported on the others
    (:func:`research.policies.judging.judging_prompts`). `over` is its speedup over the
    product, with a 95 % bootstrap interval over prompts. Empty where the recording has too few
    prompts to choose and report on different ones, or the product was not tried."""
    try:
        choose, report = judging_prompts(compared.tokens)
    except UserError:
        return pd.DataFrame()
    pools: dict[tuple[str, str, str], list[Trial]] = {}
    for trial in compared.trials:
        configuration = trial.configuration
        if isinstance(configuration.drafter, DraftModelSettings):
            heads = ", ".join(head for _, head in configuration.heads)
            key = configuration.draft or "", configuration.family, heads
            pools.setdefault(key, []).append(trial)
    best = {
        key: min(trials, key=lambda t: float(compared.seconds[t.id][choose].sum()))
        for key, trials in pools.items()
    }
    rows = []
    for (draft, family, head), trial in best.items():
        product = best.get((draft, PRODUCT, ""))
        if product is None or family == ORACLE:
            continue
        ours, theirs = (compared.seconds[t.id][report] for t in (trial, product))
        rows.append(
            {
                "recording": compared.name,
                "draft": draft,
                "family": family,
                "head": head,
                "configuration": _label(trial.configuration),
                "config_id": trial.id,
                "tried": len(pools[draft, family, head]),
                "prompts": len(report),
                **ratio_columns("over", paired_ratio(theirs, ours)),
            }
        )
    return pd.DataFrame(rows).sort_values("over", ascending=False) if rows else pd.DataFrame()


def everything(sets: list[ComparedPolicy]) -> pd.DataFrame:
    """One row a configuration and recording, the fastest first."""
    rows = [
        {
            "recording": compared.name,
            "draft": trial.configuration.draft or "",
            "family": trial.configuration.family,
            "configuration": _label(trial.configuration),
            "config_id": trial.id,
            "latency_ms": 1e3 * compared.latency(trial),
            **trial.metrics,
            **trial.counts,
        }
        for compared in sets
        for trial in by_estimate(compared.trials)
    ]
    return pd.DataFrame(rows)


def _pools(trials: Iterable[Trial]) -> dict[tuple[str | None, str], list[Trial]]:
    """The trials among which the best is chosen: each family of a draft, and all that adapt."""
    pools: dict[tuple[str | None, str], list[Trial]] = {}
    for trial in trials:
        draft, family = trial.configuration.draft, trial.configuration.family
        if family == ORACLE:
            continue
        pools.setdefault((draft, family), []).append(trial)
        adapts = isinstance(trial.configuration.drafter, DraftModelSettings) and family != FIXED
        if adapts:
            pools.setdefault((draft, ADAPTIVE), []).append(trial)
    return pools


def _gain(trial: Trial, others: list[Trial] | None) -> float:
    return trial.metrics[METRIC] / others[0].metrics[METRIC] if others else float("nan")


def _key(trial: Trial) -> str:
    """Equal for equal drafting, whatever the sampling."""
    drafter = trial.configuration.drafter
    return drafter.model_dump_json() if drafter else ""


def _label(configuration: Configuration) -> str:
    """The label without draft and sampling."""
    drafter = configuration.drafter
    if drafter is None:
        return configuration.family
    policies = drafter.policies
    return policies[0][1].label if policies else drafter.label
