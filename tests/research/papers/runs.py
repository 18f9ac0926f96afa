"""Short real runs of the tiny pair, whose counts the papers' identities are held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from specdec_core.config import Configuration, PolicySettings, Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.confidence import ConfidenceSettings
from specdec_core.drafting.policies.confidence_product import ConfidenceProductSettings
from specdec_core.drafting.policies.dynamic_confidence import DynamicConfidenceSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.heuristic import HeuristicSettings
from specdec_core.drafting.policies.pre_cut import PreCutSettings
from specdec_core.drafting.policies.svip import SvipSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Generation

POLICIES = [
    FixedSettings(max_tokens=1),
    FixedSettings(max_tokens=4),
    HeuristicSettings(),
    ConfidenceSettings(threshold=0.3),
    ConfidenceProductSettings(threshold=0.2),
    DynamicConfidenceSettings(),
    SvipSettings(threshold=1.0),
    PreCutSettings(target_cost=5),
]


def drafting(policy: PolicySettings, temperature: float = 0.0) -> Configuration:
    return Configuration(
        drafter=DraftModelSettings(policy=policy), sampling=Sampling(temperature=temperature)
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
