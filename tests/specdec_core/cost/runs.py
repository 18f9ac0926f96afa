"""Short real runs of the tiny pair, whose counts the papers' identities are held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from specdec_core.config import (
    ConfidencePolicy,
    ConfidenceProductPolicy,
    Configuration,
    DraftModelDrafter,
    DynamicConfidencePolicy,
    FixedPolicy,
    HeuristicPolicy,
    Policy,
    PreCutPolicy,
    Sampling,
    SvipPolicy,
)
from specdec_core.engine.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Generation

POLICIES = [
    FixedPolicy(max_tokens=1),
    FixedPolicy(max_tokens=4),
    HeuristicPolicy(),
    ConfidencePolicy(threshold=0.3),
    ConfidenceProductPolicy(threshold=0.2),
    DynamicConfidencePolicy(),
    SvipPolicy(threshold=1.0),
    PreCutPolicy(),
]


def drafting(policy: Policy, temperature: float = 0.0) -> Configuration:
    return Configuration(
        drafter=DraftModelDrafter(policy=policy), sampling=Sampling(temperature=temperature)
    )


def decode(pair: Pair, configuration: Configuration, slots: int = 2, **options) -> list[Generation]:
    requests = [
        Request(str(i), tuple(range(5 + i, 12 + 3 * i)), 17 + 4 * i, seed=i, **options)
        for i in range(4)
    ]
    return Engine(pair, configuration, slots=slots).generate(requests)


def frequent_token(generations: Iterable[Generation]) -> int:
    """What this model writes most often: as its end token, it ends texts early."""
    return Counter(token for g in generations for token in g.tokens).most_common(1)[0][0]
