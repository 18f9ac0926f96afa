"""What a policy is shown of a request does not depend on how the others in its batch sample."""

from __future__ import annotations

import pytest

from specdec_core.config import Configuration, DrafterSettings, Sampling
from specdec_core.drafting.draft_model.settings import CascadeSettings, DraftModelSettings
from specdec_core.drafting.dynamic_tree.settings import DynamicTreeSettings
from specdec_core.drafting.policies.svip import SvipSettings
from specdec_core.drafting.tree.settings import ForkSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Generation

POLICY = SvipSettings(threshold=2.05, max_tokens=8)
SAMPLED = Sampling(temperature=0.4, top_k=20)
PROMPTS = ((5, 6, 7, 8), (40, 41, 42), (9, 8, 7, 6, 5))


def requests() -> list[Request]:
    """Greedy and sampled ones in turn."""
    samplings = (Sampling(), SAMPLED, Sampling())
    pairs = zip(PROMPTS, samplings, strict=True)
    return [Request(str(i), p, 24, sampling=s, seed=i) for i, (p, s) in enumerate(pairs)]


def drafted(generations: list[Generation]) -> list[list[int]]:
    return [[r.depth for r in generation.rounds] for generation in generations]


@pytest.mark.parametrize(
    "drafter",
    [
        DraftModelSettings(policy=POLICY),
        ForkSettings(width=2, policy=POLICY),
        DynamicTreeSettings(expand=2, children=2, keep=12, policy=POLICY),
        CascadeSettings(policy=POLICY),
    ],
    ids=lambda drafter: drafter.kind,
)
def test_rounds_are_the_same_alone_and_beside_other_samplings(
    tiny_pair: Pair, drafter: DrafterSettings
) -> None:
    configuration = Configuration(drafter=drafter)
    alone = Engine(tiny_pair, configuration, slots=1).generate(requests())
    together = Engine(tiny_pair, configuration, slots=3).generate(requests())
    assert drafted(together) == drafted(alone)
    assert len({depth for rounds in drafted(alone) for depth in rounds}) > 2, "lengths do not vary"
