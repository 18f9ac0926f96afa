"""Texts with tokens that a draft lacks, because its target's output is padded further."""

from typing import Any

import pytest

from specdec_core.config import (
    AUTOREGRESSIVE,
    Configuration,
    PairSpec,
    RunnerSettings,
    Sampling,
    parse,
)
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from tests.conftest import tiny_llama, tiny_tokenizer

PADDING = 64
DRAFTERS = {
    "chain": {"kind": "draft_model"},
    "tree": {"kind": "tree", "branching": [2, 2]},
    "dynamic tree": {"kind": "dynamic_tree"},
    "cascade": {"kind": "cascade", "proposer": {"kind": "suffix"}},
}


@pytest.fixture(scope="module")
def pair():
    tokenizer = tiny_tokenizer()
    size = len(tokenizer)
    runner = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=150)
    spec = PairSpec(target="wide", drafts={"draft": "narrow"}, runner=runner)
    target, draft = tiny_llama(0, 32, 2, size + PADDING), tiny_llama(1, 32, 2, size)
    return Pair(spec, tokenizer, target, {"draft": draft})


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_text_with_tokens_that_the_draft_lacks_is_the_targets(pair, drafter):
    size = len(pair.tokenizer)
    lacking = size + 3
    asked: list[dict[str, Any]] = [
        {"tokens": (5, lacking, 7)},
        {"tokens": (5, 6, 7), "sampling": Sampling(logit_bias={lacking: 100.0})},
        {"tokens": (5, 6, 7), "sampling": Sampling(temperature=5.0, coupling="gumbel")},
    ]
    requests = [
        Request(str(n), max_new_tokens=24, seed=n, ignore_eos=True, **each)
        for n, each in enumerate(asked)
    ]
    expected = [g.tokens for g in Engine(pair, AUTOREGRESSIVE, 3).generate(requests)]
    assert all(max(tokens) >= size for tokens in expected[1:])
    configuration = parse(Configuration, {"drafter": DRAFTERS[drafter]}, drafter)
    assert [g.tokens for g in Engine(pair, configuration, 3).generate(requests)] == expected
