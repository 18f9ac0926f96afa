"""The best threshold of every trained head, and of the rules that need no training, by replay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdec_core.base.observer import Observer
from specdec_core.config import Configuration, PolicySettings
from specdec_core.cost import Profile, policy_key
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.heads.loaded import LoadedHead
from specdec_core.drafting.heads.storage import load_head
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.studies.forward_times import forward_times
from specdec_core.training.heads.evaluation import (
    Modelled,
    evaluate,
    training_free,
    with_thresholds,
)
from specdec_core.training.heads.finished import Finished


def judge_rules(
    recording: Recording, draft: str, profile: Path | None = None, observer: Observer | None = None
) -> dict[str, Modelled]:
    """The rules that need no training, by their names. Raises :class:`UserError` where heads could
    not be judged so, either."""
    observer = observer or Observer()
    replay, rules = Replay(recording, hidden=False, drawn=True), training_free()
    times = _times(recording, draft, [own[0] for own in rules.values()], profile, observer)
    observer.stage(f"replaying thresholds on {recording.folder.name}")
    return evaluate(replay, times, draft, rules)


def judge_heads(
    recording: Recording,
    draft: str,
    heads: Sequence[Finished],
    profile: Path | None = None,
    observer: Observer | None = None,
) -> dict[str, Modelled]:
    """The heads, by their labels; times are those of :func:`forward_times`."""
    observer = observer or Observer()
    own = recording.header.fingerprints
    folders = {head.label: head.folder for head in heads}

    def load(draft: str, head: str) -> LoadedHead:
        return load_head(folders[head], own[draft], own["target"])

    asking = {head.label: with_thresholds(head.card, str(head.folder))[0] for head in heads}
    times = _times(recording, draft, list(asking.values()), profile, observer)
    known = {
        policy_key(draft, policy.model_copy(update={"head": label})): times.policies[key]
        for label, policy in asking.items()
        if (key := policy_key(draft, policy)) in times.policies
    }
    times = times.model_copy(update={"policies": {**times.policies, **known}})
    tried = {head.label: with_thresholds(head.card, head.label) for head in heads}
    observer.stage(f"replaying thresholds on {recording.folder.name}")
    return evaluate(Replay(recording, load, drawn=True), times, draft, tried)


def _times(
    recording: Recording,
    draft: str,
    policies: Sequence[PolicySettings],
    profile: Path | None,
    observer: Observer,
) -> Profile:
    """Forward times of the recorded pair, with what the policies themselves take: measured once a
    kind and head, whatever its threshold."""
    wanted = [Configuration(drafter=DraftModelSettings(draft=draft, policy=p)) for p in policies]
    return forward_times(recording.header.pair, wanted, None, profile, observer)
