"""Evaluating heads and rules on a recording: the threshold that decodes fastest with each.

A threshold is chosen on one part of the recorded prompts and reported on the rest. The recording
must have the sampling that the threshold is for: it differs between greedy decoding and
temperature 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import AnyPolicy, Configuration, PolicySettings, Value
from specdec_core.cost import Profile, policy_key
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.heads.loaded import LoadedHead
from specdec_core.drafting.heads.storage import load_head
from specdec_core.drafting.policies.confidence import ConfidenceProductSettings, ConfidenceSettings
from specdec_core.drafting.policies.decision import DecisionSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.specdecpp import SpecDecPlusPlusSettings
from specdec_core.drafting.policies.svip import SvipSettings
from specdec_core.measure.forward_times import forward_times
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.rounds import ReplayedRounds
from specdec_core.recordings.schema import Recording
from specdec_core.training.heads.examples import (
    DEV,
    HELD_OUT,
    TEST,
    TRAIN,
    hash_places,
    rows_after,
    split_prompts,
)
from specdec_core.training.heads.finished import FinishedHead
from specdec_core.training.heads.metrics import auc

# These include SpecDec++'s 0.1, 0.3, …, 0.9.
THRESHOLDS = (*(round(0.05 * i, 2) for i in range(1, 20)), 0.975, 0.99)
PRODUCT = "confidence product"  # what a head has to beat


class Modelled(Value):
    """A policy on the prompts of a recording that it was not chosen on: its replayed counts, timed
    by the profile."""

    policy: AnyPolicy
    speedup: float  # over autoregressive decoding
    latency: float  # seconds a token
    mat: float  # tokens a round
    auc: float | None = None  # of the value it compares with its threshold, predicting acceptance
    seconds: tuple[float, ...] = ()  # of each prompt


def judging_prompts(
    prompts: Sequence[np.ndarray], trained: Sequence[np.ndarray] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the prompts that choose thresholds, and of the prompts that report: half and
    half by hash. `prompts` are tokens; a later turn has the tokens of its conversation's first
    turn, so that a conversation stays whole. Of prompts that heads were `trained` on, dev chooses
    and test reports.

    Raises:
        UserError: there are too few prompts.
    """
    split, places, fresh = split_prompts(prompts), hash_places(prompts), unseen(prompts, trained)
    rest = (split == TRAIN) & fresh
    first = places < 0.5 + HELD_OUT  # the middle of what is neither dev nor test
    choose = np.flatnonzero((split == DEV) | (rest & first))
    report = np.flatnonzero((split == TEST) | (rest & ~first))
    if not len(choose) or not len(report):
        raise UserError(
            "too few prompts to choose thresholds on some and report on others; heads were trained"
            f" on {int((~fresh).sum())} of the recording's {len(prompts)}"
        )
    return choose, report


def unseen(prompts: Sequence[np.ndarray], trained: Sequence[np.ndarray]) -> np.ndarray:
    """Which of `prompts` (n,) bool have tokens that none of the `trained` prompts has."""
    known = {np.asarray(tokens, np.int64).tobytes() for tokens in trained}
    return np.array([np.asarray(t, np.int64).tobytes() not in known for t in prompts], bool)


def prompt_seconds(
    rounds: ReplayedRounds, profile: Profile, configuration: Configuration, context: float
) -> np.ndarray:
    """Modelled seconds of each prompt (P,): SpecDec++'s Eq. 3.1, with the forwards' times at the
    widths that they have on average over all prompts; of a bandit's arms one by one."""
    seconds = np.zeros(len(rounds.ids))
    for arm, of_arm in rounds.by_arm().items():
        by_arm = configuration.by(arm)
        counts, cost = of_arm.counts, profile.under(by_arm)
        whole = cost.estimate_seconds(counts, by_arm.draft, context)
        undrafted = replace(counts, n_draft=0, n_draft_tokens=0)
        verifying = cost.estimate_seconds(undrafted, by_arm.draft, context)
        seconds += of_arm.by_prompt() * (verifying / max(counts.n_target, 1))
        seconds += of_arm.by_prompt(of_arm.draft_forwards) * (
            (whole - verifying) / max(counts.n_draft, 1)
        )
    return seconds


def chosen(
    replay: Replay,
    profile: Profile,
    draft: str,
    policies: Sequence[PolicySettings],
    prompts: tuple[np.ndarray, np.ndarray],
) -> Modelled:
    """The policy that is fastest on the first of `prompts`, as it does on the second."""
    choose, report = prompts
    context, sampling = replay.recording.prompts.context, replay.header.sampling
    tried = []
    for policy in policies:
        drafter = DraftModelSettings(draft=draft, policy=policy)
        configuration = Configuration(drafter=drafter, sampling=sampling)
        rounds = replay.run(configuration)
        tried.append((policy, rounds, prompt_seconds(rounds, profile, configuration, context)))
    policy, rounds, seconds = min(tried, key=lambda each: float(each[2][choose].sum()))
    tokens = int(rounds.by_prompt(rounds.generated)[report].sum())
    targets, total = int(rounds.by_prompt()[report].sum()), float(seconds[report].sum())
    return Modelled(
        policy=policy,
        speedup=profile.autoregressive_seconds(tokens, context) / total if total else 1.0,
        latency=total / max(tokens, 1),
        mat=tokens / max(targets, 1),
        seconds=tuple(seconds[report].tolist()),
    )


def with_thresholds(
    card: HeadCard, head: str, thresholds: Sequence[float] = THRESHOLDS
) -> list[PolicySettings]:
    """The policies that a head can steer. Decision models are tried on the candidate alone and on
    the product over the round."""
    if card.kind == "specdecpp":
        return [SpecDecPlusPlusSettings(head=head, threshold=h) for h in thresholds]
    return [
        DecisionSettings(head=head, threshold=h, cumulative=cumulative)
        for cumulative in (False, True)
        for h in thresholds
    ]


def training_free() -> dict[str, list[PolicySettings]]:
    """The baselines that heads have to beat, by name."""
    return {
        "fixed K": [FixedSettings(max_tokens=k) for k in range(1, 16)],
        "confidence": [ConfidenceSettings(threshold=h) for h in THRESHOLDS],
        PRODUCT: [ConfidenceProductSettings(threshold=h) for h in THRESHOLDS],
        "SVIP": [SvipSettings(threshold=h / 10) for h in range(1, 21)],
    }


def predictor_auc(
    replay: Replay, draft: str, policy: PolicySettings, prompts: np.ndarray | None = None
) -> float:
    """Area under the ROC curve of the value that a threshold policy compares, as a predictor of
    whether a candidate of the trajectory is accepted; on the numbered `prompts`, unset on all."""
    trace = replay.track(draft).trace
    rule = replay.rule(draft, policy)
    values = replay.track(draft).values(rule)
    candidates, after = rows_after(trace, draft)
    if prompts is not None:
        inside = np.isin(trace.prompt[candidates], prompts)
        candidates, after = candidates[inside], after[inside]
    compared = values[after if rule.lagging else candidates]
    if not rule.stops(-np.inf):  # it stops at high values, such as an entropy
        compared = -compared
    return auc(compared, trace.draft_token[candidates] == trace.target_token[candidates])


def evaluate(
    replay: Replay,
    profile: Profile,
    draft: str,
    policies: Mapping[str, Sequence[PolicySettings]],
    trained: Sequence[np.ndarray] = (),
) -> dict[str, Modelled]:
    """The policy chosen for each name. `trained` are the prompts that heads were trained on."""
    prompts = judging_prompts(replay.recording.prompts.first_turns, trained)
    fastest = {name: chosen(replay, profile, draft, p, prompts) for name, p in policies.items()}
    return {
        name: modelled
        if isinstance(modelled.policy, FixedSettings)
        else modelled.model_copy(
            update={"auc": predictor_auc(replay, draft, modelled.policy, prompts[1])}
        )
        for name, modelled in fastest.items()
    }


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
    return evaluate(replay, times, draft, rules, _first_turns(trained))


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
    return evaluate(replay, times, draft, tried, _first_turns(trained))


def _first_turns(recordings: Sequence[Recording]) -> list[np.ndarray]:
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
