"""What trained heads are worth: on a recording, which threshold decodes fastest with each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specdec_core.config import (
    ConfidencePolicy,
    ConfidenceProductPolicy,
    Configuration,
    DecisionPolicy,
    DraftModelDrafter,
    FixedPolicy,
    Policy,
    SpecDecPlusPlusPolicy,
    SvipPolicy,
    Value,
)
from specdec_core.cost import Profile
from specdec_core.heads.card import HeadCard
from specdec_core.heads.data import rows_behind
from specdec_core.heads.metrics import auc
from specdec_core.traces.replay import Replay

# SpecDec++'s 0.1, 0.3, …, 0.9 among them
THRESHOLDS = (*(round(0.05 * i, 2) for i in range(1, 20)), 0.975, 0.99)


class Modelled(Value):
    """A policy on a recording: what the profile says that its replayed counts take."""

    policy: Policy
    speedup: float  # over autoregressive decoding
    latency: float  # seconds a token
    mat: float  # tokens a round
    auc: float | None = None  # of what the policy compares, as a predictor of acceptance


def model(replay: Replay, profile: Profile, draft: str, policy: Policy) -> Modelled:
    """Replay one policy."""
    drafter = DraftModelDrafter(draft=draft, policy=policy)
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


def best(replay: Replay, profile: Profile, draft: str, policies: Sequence[Policy]) -> Modelled:
    """The fastest of some policies, as modelled."""
    return max((model(replay, profile, draft, p) for p in policies), key=lambda m: m.speedup)


def with_thresholds(
    card: HeadCard, head: str, thresholds: Sequence[float] = THRESHOLDS
) -> list[Policy]:
    """The policies that a head can steer. Decision models are tried both ways: by the candidate
    alone, and by the round's product."""
    if card.kind == "specdecpp":
        return [SpecDecPlusPlusPolicy(head=head, threshold=h) for h in thresholds]
    return [
        DecisionPolicy(head=head, threshold=h, cumulative=cumulative)
        for cumulative in (False, True)
        for h in thresholds
    ]


def training_free() -> dict[str, list[Policy]]:
    """What heads have to beat, by name."""
    return {
        "fixed K": [FixedPolicy(max_tokens=k) for k in range(1, 16)],
        "confidence": [ConfidencePolicy(threshold=h) for h in THRESHOLDS],
        "confidence product": [ConfidenceProductPolicy(threshold=h) for h in THRESHOLDS],
        "SVIP": [SvipPolicy(threshold=h / 10) for h in range(1, 21)],
    }


def predictor_auc(replay: Replay, draft: str, policy: Policy) -> float:
    """How well what a threshold policy compares for a candidate tells accepted candidates of the
    trajectory from rejected ones: the area under the ROC curve."""
    trace = replay.track(draft).trace
    values = replay.values(draft, policy)
    rows, behind = rows_behind(trace)
    if not isinstance(policy, SpecDecPlusPlusPolicy):
        behind = rows
    if isinstance(policy, SvipPolicy):
        values = -values  # an entropy
    return auc(values[behind], trace.draft_token[rows] == trace.target_token[rows])


def evaluate(
    replay: Replay, profile: Profile, draft: str, policies: Mapping[str, Sequence[Policy]]
) -> dict[str, Modelled]:
    """The best policy of each name."""
    return {name: _judged(replay, profile, draft, own) for name, own in policies.items()}


def _judged(replay: Replay, profile: Profile, draft: str, policies: Sequence[Policy]) -> Modelled:
    found = best(replay, profile, draft, policies)
    if isinstance(found.policy, FixedPolicy):
        return found
    return found.model_copy(update={"auc": predictor_auc(replay, draft, found.policy)})
