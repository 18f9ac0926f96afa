"""What a recording says about drafts and policies, as the tables that figures draw."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd

from dashboards.figures.heads import head_names
from dashboards.ranking import best_of, champion, draft_of, family, label, policy_of, ranked
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PolicySettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.pre_cut import PreCutSettings
from specdec_core.recordings.confidence_products import prefixes
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.recordings.track import Track
from specdec_core.recordings.unrolled import track_of
from specdec_core.search.results import SweepResult, Trial


@dataclass(frozen=True)
class Evidence:
    """The tables by draft, by round and by configuration. Those that need a replay are empty where
    the recording cannot be replayed."""

    recording: Recording
    draft: str  # the champion's, or the first recorded
    tokens: dict[str, pd.DataFrame]  # by draft, see :func:`trajectory`
    prefixes: dict[str, pd.DataFrame] = field(
        default_factory=dict
    )  # by draft: drafts and what became of them
    distances: pd.DataFrame | None = None  # see :func:`oracle_distances`
    runs: dict[str, pd.DataFrame] = field(default_factory=dict)  # rounds, see :func:`learning_runs`
    families: dict[str, str] = field(default_factory=dict)  # of the runs


def gather(result: SweepResult, traces: Path) -> Evidence:
    """Read the recording in `traces` and replay the best configuration of each family of the
    sweep. Raises :class:`UserError` where it is missing or broken."""
    recording = Recording.open(traces)
    names = list(recording.header.pair.drafts)
    best = champion(result)
    draft = draft_of(result, best) if best else None
    draft = draft if draft in names else recording.draft_name()
    if not recording.header.replayable:
        tracks = {name: track_of(recording.trace(name, hidden=False), name) for name in names}
        tokens = {name: trajectory(track) for name, track in tracks.items()}
        return Evidence(recording, draft, tokens)
    # hidden states, most of a recording, are for heads
    replay = Replay(recording, hidden=bool(head_names(result)))
    tracks = {name: replay.track(name) for name in names}
    runs, families = learning_runs(result, replay, draft)
    return Evidence(
        recording,
        draft,
        tokens={name: trajectory(track) for name, track in tracks.items()},
        prefixes={name: prefixes(track) for name, track in tracks.items()},
        distances=oracle_distances(result, replay),
        runs=runs,
        families=families,
    )


def trajectory(track: Track) -> pd.DataFrame:
    """One row a position of the target's output where the draft has a token: `entropy`,
    `cross_entropy`, `probability`, `overlap` (β) and `accepted`, whether it is the target's."""
    trace = track.trace
    names = ("entropy", "cross_entropy", "probability", "overlap")
    columns = {name: trace.columns[name][trace.drafted] for name in names}
    accepted = trace.draft_token[trace.drafted] == trace.target_token[trace.drafted]
    return pd.DataFrame({**columns, "accepted": accepted})


def oracle_distances(result: SweepResult, replay: Replay) -> pd.DataFrame:
    """One row a round of the best configuration of each family: `label`, `family`, `drafted` and
    `oracle`, the candidates that would have been accepted at most (bounded as the round was, by
    what is left of the output and by the longest draft recorded)."""
    parts = []
    for trial in _best_of_each(result, replay):
        draft = draft_of(result, trial)
        track = replay.track(draft)
        try:
            rounds = replay.run(trial.configuration)
        except UserError:  # a head that is gone; the other policies can still be shown
            continue
        starts = np.flatnonzero(track.position == 0)[rounds.prompt] + rounds.position
        frame = pd.DataFrame({
            "drafted": rounds.drafted,
            "oracle": np.minimum(track.agreeing, track.bound)[starts],
        })  # fmt: skip
        parts.append(frame.assign(label=label(result, trial), family=family(trial)))
    columns = ["drafted", "oracle", "label", "family"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def _best_of_each(result: SweepResult, replay: Replay) -> list[Trial]:
    """The fastest configuration with a draft model of each family that can be replayed."""
    best: dict[str, Trial] = {}
    for trial in ranked(result):
        drafter = trial.configuration.drafter
        if isinstance(drafter, DraftModelSettings) and replay.can(trial.configuration):
            best.setdefault(family(trial), trial)
    return list(best.values())


def learning_runs(
    result: SweepResult, replay: Replay, draft: str
) -> tuple[dict[str, pd.DataFrame], dict[str, str]]:
    """Rounds of policies of `draft`, by name: fixed K, Pre-cut as it learns, and Pre-cut with each
    of its initial tables (Q_init, D.4.3 and §6.4); and each policy's family. Their settings are
    those of the sweep's best of the family, where it has one; else Pre-cut is left out where the
    profile does not tell what a target forward costs."""
    costs, own = result.profile, PreCutSettings()
    if draft in costs.drafts:
        own = own.at_cost(costs.target_cost(draft))
    fixed = _best_policy(result, "fixed", FixedSettings())
    learning = _best_policy(result, "pre_cut", own)
    runs: dict[str, pd.DataFrame] = {}
    families: dict[str, str] = {}
    first = learning.model_copy(update={"exploration": 0.0, "updates": False})
    policies: dict[str, PolicySettings] = {
        fixed.label: fixed,
        "pre-cut, Q updated": learning,
        "pre-cut, Q_init": first.model_copy(update={"q_init": "continue"}),
        "pre-cut, Q_init by confidence": first.model_copy(update={"q_init": "confidence"}),
    }
    for name, policy in policies.items():
        drafter = DraftModelSettings(draft=draft, policy=policy)
        configuration = Configuration(drafter=drafter, sampling=replay.header.sampling)
        if replay.can(configuration):
            runs[name] = replay.run(configuration).frame()
            families[name] = policy.kind
    return runs, families


Settings = TypeVar("Settings", bound=PolicySettings)


def _best_policy(result: SweepResult, family: str, otherwise: Settings) -> Settings:
    """A sweep's fastest policy of a family; where it has none, `otherwise`, of the same kind."""
    trial = best_of(result, family)
    policy = policy_of(trial) if trial else None
    return policy if isinstance(policy, type(otherwise)) else otherwise
