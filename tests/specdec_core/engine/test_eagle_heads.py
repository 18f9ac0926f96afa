"""An EAGLE head drafts under every drafter, and the output stays the target's."""

from dataclasses import replace

import pytest
import torch

from specdec_core.config import AUTOREGRESSIVE, Sampling
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from tests.specdec_core.drafting.proofs import proposals
from tests.specdec_core.fits import fit
from tests.specdec_core.kinds import configured
from tests.specdec_core.models.eagle.pair_heads import head_of, taught_head_of
from tests.toy_pair import toy_pair

HEAD = "head"
PROMPTS = [tuple(range(5, 5 + n)) for n in (1, 2, 9, 30, 17)]
DRAFTERS = {
    "chain": {"kind": "draft_model", "policy": {"kind": "svip", "threshold": 3.0}},
    "tree": {"kind": "tree"},
    "fork": {"kind": "fork"},
    "dynamic tree": {"kind": "dynamic_tree"},
    "cascade": {"kind": "cascade"},
    "post-use": {"kind": "post_use"},
}


def pair_with_head(pair, **options):
    """The pair with a random head as a further draft."""
    return replace(pair, drafts={**pair.drafts, HEAD: head_of(pair, **options)})


@pytest.fixture(scope="module")
def pair(tiny_pair):
    return pair_with_head(tiny_pair)


def requests(count=24):
    return [Request(str(n), prompt, count, seed=n) for n, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def expected(pair):
    return [g.tokens for g in Engine(pair, AUTOREGRESSIVE).generate(requests())]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_output_is_the_targets_own(pair, kind, expected):
    engine = Engine(pair, configured({**DRAFTERS[kind], "draft": HEAD}), 3)
    generations = engine.generate(requests())
    assert [g.tokens for g in generations] == expected
    assert sum(r.drafted for g in generations for r in g.rounds) > 20


TEXTS = [tuple(range(first, first + 60)) for first in (5, 40, 90)]
WRITTEN = [Request(str(n), text, 80, ignore_eos=True) for n, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def taught(tiny_pair):
    """The pair with a head that knows what the target writes."""
    written = Engine(tiny_pair, AUTOREGRESSIVE, 3).generate(WRITTEN)
    texts = [[*text, *own.tokens] for text, own in zip(TEXTS, written, strict=True)]
    return replace(tiny_pair, drafts={HEAD: taught_head_of(tiny_pair, texts, len(TEXTS[0]))})


@pytest.mark.parametrize("kind", ["chain", "dynamic tree"])
def test_drafts_stay_as_good_in_chunks_and_after_preemption(taught, kind):
    def rounds(limits):
        engine = Engine(taught, configured({**DRAFTERS[kind], "draft": HEAD}), limits=limits)
        found = [[(r.drafted, r.accepted) for r in g.rounds] for g in engine.generate(WRITTEN)]
        assert (engine.scheduler.preemptions > 0) == (limits.cache_tokens is not None)
        return found

    alone = rounds(Limits(1))
    assert sum(accepted for text in alone for _, accepted in text) > 120  # of 240 tokens
    assert rounds(Limits(3, step_tokens=16, cache_tokens=384)) == alone


def test_a_head_shares_the_round_with_other_drafts(pair, expected):
    head, model = ({"kind": "draft_model", "draft": name} for name in (HEAD, "draft"))
    for drafter in (
        {"kind": "bandit", "arms": [head, model, {"kind": "suffix"}]},
        {"kind": "hybrid", "otherwise": head, "merge": True},
    ):
        engine = Engine(pair, configured(drafter), 3)
        assert [g.tokens for g in engine.generate(requests())] == expected


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [
        ({"kind": "draft_model"}, Sampling(temperature=0.7, top_k=3)),
        ({"kind": "draft_model"}, Sampling(temperature=1.0, coupling="gumbel")),
        (
            {"kind": "dynamic_tree", "expand": 2, "children": 2, "keep": 5},
            Sampling(temperature=1.0),
        ),
    ],
    ids=["chain", "coupled", "dynamic tree"],
)
def test_samples_have_the_targets_joint_distribution(drafter, sampling):
    pair = pair_with_head(toy_pair(), tokens=3)  # every second one
    assert fit({**drafter, "draft": HEAD}, sampling, pair=pair) > 1e-3


def test_numbers_of_the_wrong_vocabulary_would_be_found(monkeypatch):
    propose = Engine._draft

    def by_draft_numbers(engine, active):
        trees = propose(engine, active)
        for tree in trees:
            tree.draft_probs = [torch.cat([q[::2], q[1::2]]) for q in tree.draft_probs]
        return trees

    monkeypatch.setattr(Engine, "_draft", by_draft_numbers)
    pair = pair_with_head(toy_pair(), tokens=3)
    assert fit({"kind": "draft_model", "draft": HEAD}, Sampling(temperature=1.0), pair=pair) < 1e-6


@torch.inference_mode()
def test_a_head_proposes_tokens_of_its_own_vocabulary_alone(pair):
    head = pair.drafts[HEAD]
    configuration = configured({"kind": "draft_model", "draft": HEAD}, Sampling(temperature=2.0))
    engine = Engine(pair, configuration, 3)
    seen = proposals(engine.drafter)
    engine.generate(requests(48))
    proposed = {token for own in seen for token in own.tree.tokens}
    assert len(proposed) > 20
    assert proposed <= set(head.proposable.tolist())
