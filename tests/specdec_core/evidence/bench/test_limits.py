"""The oracle's rounds begin behind the token that the prompt's own forward yields."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec_core.config import AUTOREGRESSIVE
from specdec_core.engine import Engine, Request
from specdec_core.evidence.bench.limits import oracle_limits
from specdec_core.evidence.bench.result import ForwardMilliseconds
from specdec_core.models.pair import Pair


def test_a_draft_that_is_the_target_is_verified_once_after_the_first_token(
    tiny_pair: Pair,
) -> None:
    pair = replace(tiny_pair, drafts={"draft": tiny_pair.target})
    [text] = Engine(pair, AUTOREGRESSIVE).generate([Request("a", (5, 6, 7), 9, ignore_eos=True)])
    times = {
        "target": ForwardMilliseconds(context=8, seconds={1: 1.0, 16: 1.0}),
        "draft": ForwardMilliseconds(context=8, seconds={1: 0.1, 16: 0.1}),
    }
    [oracle] = oracle_limits(pair, [((5, 6, 7), text.tokens)], times)
    assert oracle.verification_rate == pytest.approx(1 / 8)
    assert oracle.seconds_per_token == pytest.approx((1.0 + 7 * 0.1) / 9)
