"""What a recording says about drafts and length policies, as the tables that figures draw."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from dashboards.figures.heads import head_names
from dashboards.ranking import draft_of, family, label, leaders
from specdec_core.base.errors import UserError
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.recordings.track import Track
from specdec_core.recordings.unrolled import track_of
from specdec_core.search.results import SweepResult


@dataclass(frozen=True)
class Evidence:
    """Tables by draft and by round; `distances` is None where the recording cannot be replayed."""

    tokens: dict[str, pd.DataFrame]  # by draft, see :func:`trajectory`
    distances: pd.DataFrame | None = None  # see :func:`oracle_distances`


def gather(result: SweepResult, traces: Path) -> Evidence:
    """Read the recording in `traces` and replay the best configuration of each family of the
    sweep. Raises :class:`UserError` where it is missing or broken."""
    recording = Recording.open(traces)
    names = list(recording.header.pair.drafts)
    if not recording.header.replayable:
        tracks = {name: track_of(recording.trace(name, hidden=False), name) for name in names}
        return Evidence({name: trajectory(track) for name, track in tracks.items()})
    # hidden states, most of a recording, are for heads
    replay = Replay(recording, hidden=bool(head_names(result)))
    tokens = {name: trajectory(replay.track(name)) for name in names}
    return Evidence(tokens, oracle_distances(result, replay))


def trajectory(track: Track) -> pd.DataFrame:
    """One row a position of the target's output where the draft has a token: `entropy`, and
    `accepted`, whether it is the target's."""
    trace = track.trace
    accepted = trace.draft_token[trace.drafted] == trace.target_token[trace.drafted]
    return pd.DataFrame({"entropy": trace.columns["entropy"][trace.drafted], "accepted": accepted})


def oracle_distances(result: SweepResult, replay: Replay) -> pd.DataFrame:
    """One row a round of the best configuration of each family that can be replayed: `label`,
    `family`, `drafted` and `oracle`, the candidates that would have been accepted at most (bounded
    as the round was, by what is left of the output and by the longest draft recorded)."""
    parts = [pd.DataFrame(columns=["drafted", "oracle", "label", "family"])]
    replayable = [
        trial
        for trial in result.trials
        if isinstance(trial.configuration.drafter, DraftModelSettings)
        and replay.can(trial.configuration)
    ]
    for trial in leaders(result.model_copy(update={"trials": replayable})):
        track = replay.track(draft_of(result, trial))
        try:
            rounds = replay.run(trial.configuration)
        except UserError:  # a head that is gone; the other policies can still be shown
            continue
        starts = np.flatnonzero(track.position == 0)[rounds.prompt] + rounds.position
        oracle = np.minimum(track.agreeing, track.bound)[starts]
        frame = pd.DataFrame({"drafted": rounds.drafted, "oracle": oracle})
        parts.append(frame.assign(label=label(result, trial), family=family(trial)))
    return pd.concat(parts[1:] or parts, ignore_index=True)
