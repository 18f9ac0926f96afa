"""The best threshold of every trained head and of every training-free rule, by replay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specdec_core.base.observer import Observer
from specdec_core.config import Configuration, PolicySettings
from specdec_core.cost import Profile, policy_key
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.heads.loaded import LoadedHead
from specdec_core.drafting.heads.storage import load_head
from specdec_core.measure.forward_times import forward_times
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.training.heads.evaluation import (
    Modelled,
    evaluate,
    training_free,
    with_thresholds,
)
from specdec_core.training.heads.finished import FinishedHead


def judge_rules(
    recording: Recording,
    draft: str,
    trained: Sequence[Recording],
    profile: Path | None = None,
    observer: Observer | None = None,
) -> dict[str, Modelled]:
    """The training-free rules, by their names, chosen and reported on the prompts that heads of the
    recordings `trained` will be. Raises :class:`UserError` where the recording cannot be
    replayed."""
    observer = observer or Observer()
    replay, rules = Replay(recording, hidden=False, drawn=True), training_free()
    times = _times(recording, draft, [tried[0] for tried in rules.values()], profile, observer)
    observer.stage(f"replaying thresholds on {recording.folder.name}")
    return evaluate(replay, times, draft, rules, _prompts(trained))


def judge_heads(
    recording: Recording,
    draft: str,
    heads: Sequence[FinishedHead],
    trained: Sequence[Recording],
    profile: Path | None = None,
    observer: Observer | None = None,
) -> dict[str, Modelled]:
    """The heads, trained on the recordings `trained`, by their labels; times come from
    :func:`forward_times`."""
    observer = observer or Observer()
    prints = recording.header.fingerprints
    folders = {head.label: head.folder for head in heads}

    def load(draft: str, head: str) -> LoadedHead:
        return load_head(folders[head], prints[draft], prints["target"])

    by_folder = {head.label: with_thresholds(head.card, str(head.folder))[0] for head in heads}
    times = _times(recording, draft, list(by_folder.values()), profile, observer)
    by_label = {
        policy_key(draft, policy.model_copy(update={"head": label})): times.policies[key]
        for label, policy in by_folder.items()
        if (key := policy_key(draft, policy)) in times.policies
    }
    times = times.model_copy(update={"policies": {**times.policies, **by_label}})
    tried = {head.label: with_thresholds(head.card, head.label) for head in heads}
    observer.stage(f"replaying thresholds on {recording.folder.name}")
    replay = Replay(recording, load, drawn=True)
    return evaluate(replay, times, draft, tried, _prompts(trained))


def _prompts(recordings: Sequence[Recording]) -> list[np.ndarray]:
    return [tokens for recording in recordings for tokens in recording.prompts.first_turns]


def _times(
    recording: Recording,
    draft: str,
    policies: Sequence[PolicySettings],
    profile: Path | None,
    observer: Observer,
) -> Profile:
    """Forward times of the recorded pair, and times of the policies: measured once for each kind
    and head, whatever its threshold."""
    drafters = [DraftModelSettings(draft=draft, policy=policy) for policy in policies]
    configurations = [Configuration(drafter=drafter) for drafter in drafters]
    header = recording.header
    return forward_times(header.pair, configurations, None, profile, observer, header.fingerprints)
