"""A policy's input for a request does not depend on how the other requests in its batch sample."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_core.config import Sampling
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.statistics import Generation
from tests.specdec_core.kinds import configured

POLICY = {"kind": "svip", "threshold": 2.05, "max_tokens": 8}
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
        {"kind": "draft_model"},
        {"kind": "fork", "width": 2},
        {"kind": "dynamic_tree", "expand": 2, "children": 2, "keep": 12},
        {"kind": "cascade"},
    ],
    ids=lambda drafter: drafter["kind"],
)
def test_rounds_are_the_same_alone_and_beside_other_samplings(
    tiny_pair: Pair, drafter: dict[str, Any]
) -> None:
    configuration = configured(drafter | {"policy": POLICY})
    alone = Engine(tiny_pair, configuration, slots=1).generate(requests())
    together = Engine(tiny_pair, configuration, slots=3).generate(requests())
    assert drafted(together) == drafted(alone)
    assert len({depth for rounds in drafted(alone) for depth in rounds}) > 2, "lengths do not vary"
