"""Evaluating trained heads on a recording: the threshold that decodes fastest with each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specdec_core.config import AnyPolicy, Configuration, PolicySettings, Value
from specdec_core.cost import Profile
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.heads.metrics import auc
from specdec_core.drafting.policies.confidence import ConfidenceSettings
from specdec_core.drafting.policies.confidence_product import ConfidenceProductSettings
from specdec_core.drafting.policies.decision import DecisionSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.specdecpp import SpecDecPlusPlusSettings
from specdec_core.drafting.policies.svip import SvipSettings
from specdec_core.recordings.replay import Replay
from specdec_core.training.heads.examples import rows_after

# These include SpecDec++'s 0.1, 0.3, …, 0.9.
THRESHOLDS = (*(round(0.05 * i, 2) for i in range(1, 20)), 0.975, 0.99)


class Modelled(Value):
    """A policy on a recording: its replayed counts, timed by the profile."""

    policy: AnyPolicy
    speedup: float  # over autoregressive decoding
    latency: float  # seconds a token
    mat: float  # tokens a round
    auc: float | None = None  # of the value it compares with its threshold, predicting acceptance


def model(replay: Replay, profile: Profile, draft: str, policy: PolicySettings) -> Modelled:
    """Replay one policy."""
    drafter = DraftModelSettings(draft=draft, policy=policy)
    sampling = replay.header.sampling
    configuration = Configuration(drafter=drafter, sampling=sampling)
    counts, profile = replay.run(configuration).counts, profile.under(configuration)
    prompts = replay.recording.prompts
    lengths = [len(t) + len(o) // 2 for t, o in zip(prompts.tokens, prompts.outputs, strict=True)]
    context = float(np.mean(lengths))
    return Modelled(
        policy=policy,
        speedup=profile.speedup(counts, draft, context),
        latency=profile.estimate_seconds(counts, draft, context) / max(counts.n, 1),
        mat=counts.n / max(counts.n_target, 1),
    )


def best(
    replay: Replay, profile: Profile, draft: str, policies: Sequence[PolicySettings]
) -> Modelled:
    """The fastest of some policies, as modelled."""
    return max((model(replay, profile, draft, p) for p in policies), key=lambda m: m.speedup)


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
        "confidence product": [ConfidenceProductSettings(threshold=h) for h in THRESHOLDS],
        "SVIP": [SvipSettings(threshold=h / 10) for h in range(1, 21)],
    }


def predictor_auc(replay: Replay, draft: str, policy: PolicySettings) -> float:
    """Area under the ROC curve of the value that a threshold policy compares, as a predictor of
    whether a candidate of the trajectory is accepted."""
    trace = replay.track(draft).trace
    rule = replay.rule(draft, policy)
    values = replay.track(draft).values(rule)
    candidates, after = rows_after(trace)
    compared = values[after if rule.lagging else candidates]
    if not rule.stops(-np.inf):  # it stops at high values, such as an entropy
        compared = -compared
    return auc(compared, trace.draft_token[candidates] == trace.target_token[candidates])


def evaluate(
    replay: Replay, profile: Profile, draft: str, policies: Mapping[str, Sequence[PolicySettings]]
) -> dict[str, Modelled]:
    """The best policy of each name."""
    fastest = {name: best(replay, profile, draft, tried) for name, tried in policies.items()}
    return {
        name: modelled
        if isinstance(modelled.policy, FixedSettings)
        else modelled.model_copy(update={"auc": predictor_auc(replay, draft, modelled.policy)})
        for name, modelled in fastest.items()
    }
