"""Drafts with fewer positions or tokens than the target: the output stays the target's."""

import logging
from typing import Any

import pytest

from specdec_core import config
from specdec_core.config.kinds import DRAFTERS
from specdec_core.drafting.pearl.settings import PearlSettings
from specdec_core.engine import Engine, Request
from specdec_core.models import pair as pairs
from specdec_core.models.pair import Pair, check_pair
from tests.conftest import tiny_llama, tiny_tokenizer
from tests.specdec_core.drafting.pearl.in_turns import InTurns, linked
from tests.specdec_core.drafting.proofs import PROMPTS
from tests.specdec_core.kinds import drafter
from tests.specdec_core.recordings.short_pair import HEAD, POSITIONS, short_pair, short_spec
from tests.specdec_core.recordings.test_every_kind import home  # noqa: F401 (a fixture)

LONG = 60  # tokens of an output: the target has 256 positions here
# They draft from texts alone, which have no limit.
FROM_TEXTS = {"prompt_lookup", "suffix", "token_cache", "hybrid"}
FROM_TEXTS |= {"bandit", "schedule", "post_use"}  # in part
LOSSLESS = {"target_tree": {"branching": [1, 3, 2]}, "target_fork": {"width": 1}}


@pytest.fixture(scope="module")
def pair(tiny_pair, tmp_path_factory):
    return short_pair(tiny_pair, tmp_path_factory.mktemp("short"))


def requests():
    return [Request(str(n), p, LONG, seed=n, ignore_eos=True) for n, p in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def expected(pair):
    return [g.tokens for g in Engine(pair, config.AUTOREGRESSIVE, 3).generate(requests())]


def assert_drafts_as_far_as_it_reads(found, expected):
    assert [g.tokens for g in found] == expected
    near = 0
    for generation in found:
        for round in generation.rounds:
            # The last candidate is not read.
            text = generation.prompt_tokens + round.position
            assert text + round.depth <= max(POSITIONS + 1, text)
            near += round.depth > 0 and text + round.depth > POSITIONS - 2
    assert near, "no draft came near the end"


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("kind", sorted({*DRAFTERS} - {"pearl"}))
def test_greedy_output_goes_on_where_no_draft_model_can(pair, expected, kind):
    configuration = config.Configuration(drafter=drafter(kind, **LOSSLESS.get(kind, {})))
    found = Engine(pair, configuration, 3).generate(requests())
    if kind not in FROM_TEXTS:
        assert_drafts_as_far_as_it_reads(found, expected)
    else:
        assert [g.tokens for g in found] == expected
        assert any(r.drafted for g in found for r in g.rounds if r.position > POSITIONS)


@pytest.mark.parametrize("kind", ["draft_model", "dynamic_tree", "cascade"])
def test_a_head_drafts_as_far_as_it_has_positions(pair, expected, kind):
    configuration = config.Configuration(drafter=drafter(kind, draft=HEAD))
    found = Engine(pair, configuration, 3).generate(requests())
    assert_drafts_as_far_as_it_reads(found, expected)


def test_an_asynchronous_draft_drafts_as_far_as_it_reads(pair, expected):
    configuration = config.Configuration(drafter=PearlSettings(window=4, wait=2))
    link = InTurns(pair, 0)
    engine = Engine(linked(pair, link), configuration, 3)
    assert_drafts_as_far_as_it_reads(engine.generate(requests()), expected)


def test_a_short_draft_limits_no_request_and_is_named_once(tiny_spec, tmp_path_factory, caplog):
    spec = short_spec(tiny_spec, tmp_path_factory.mktemp("named"))
    with caplog.at_level(logging.WARNING):
        assert pairs.max_length_of(spec) == 256
        check_pair(spec)
        check_pair(spec)
    [line] = [record.getMessage() for record in caplog.records]
    assert spec.drafts["draft"] in line
    assert f"has {POSITIONS} positions, and sequences may have 256 tokens" in line
    assert pairs.short_drafts(tiny_spec) == {}


def test_a_draft_whose_longrope_changes_drafts_before_that(longrope_folder, tiny_spec):
    """As a target it would be refused."""
    drafts = {"draft": str(longrope_folder)}
    check_pair(tiny_spec.model_copy(update={"drafts": drafts}))
    assert pairs.short_drafts(tiny_spec.model_copy(update={"drafts": drafts})) == {"draft": 64}


PADDING = 64
PADDED = {
    "chain": {"kind": "draft_model"},
    "tree": {"kind": "tree", "branching": [2, 2]},
    "dynamic tree": {"kind": "dynamic_tree"},
    "cascade": {"kind": "cascade", "proposer": {"kind": "suffix"}},
}


@pytest.fixture(scope="module")
def padded_pair():
    tokenizer = tiny_tokenizer()
    size = len(tokenizer)
    runner = config.RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=150)
    spec = config.PairSpec(target="wide", drafts={"draft": "narrow"}, runner=runner)
    target, draft = tiny_llama(0, 32, 2, size + PADDING), tiny_llama(1, 32, 2, size)
    return Pair(spec, tokenizer, target, {"draft": draft})


@pytest.mark.parametrize("drafter", PADDED)
def test_a_text_with_tokens_that_the_draft_lacks_is_the_targets(padded_pair, drafter):
    size = len(padded_pair.tokenizer)
    lacking = size + 3
    asked: list[dict[str, Any]] = [
        {"tokens": (5, lacking, 7)},
        {"tokens": (5, 6, 7), "sampling": config.Sampling(logit_bias={lacking: 100.0})},
        {"tokens": (5, 6, 7), "sampling": config.Sampling(temperature=5.0, coupling="gumbel")},
    ]
    requests = [
        Request(str(n), max_new_tokens=24, seed=n, ignore_eos=True, **each)
        for n, each in enumerate(asked)
    ]
    expected = [g.tokens for g in Engine(padded_pair, config.AUTOREGRESSIVE, 3).generate(requests)]
    assert all(max(tokens) >= size for tokens in expected[1:])
    configuration = config.parse(config.Configuration, {"drafter": PADDED[drafter]}, drafter)
    assert [g.tokens for g in Engine(padded_pair, configuration, 3).generate(requests)] == expected
