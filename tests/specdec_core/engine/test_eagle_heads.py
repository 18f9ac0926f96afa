"""An EAGLE head drafts under every drafter, and the output stays the target's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from research.drift.drift import goodness_of_fit
from research.drift.toy_pair import exact_distribution, sample_counts, toy_pair
from specdec_core.config import AUTOREGRESSIVE, Configuration, Sampling, parse
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import Pair
from specdec_core.tokens.token_tree import TokenTree
from tests.specdec_core.fits import alike_behind_the_first
from tests.specdec_core.models.eagle.pair_heads import head_of, taught_head_of

HEAD = "head"
PROMPTS = [tuple(range(5, 5 + n)) for n in (1, 2, 9, 30, 17)]
DRAFTERS = {
    "chain": {"kind": "draft_model"},
    "svip": {"kind": "draft_model", "policy": {"kind": "svip", "threshold": 3.0}},
    "product": {"kind": "draft_model", "policy": {"kind": "confidence_product"}},
    "pre-cut": {"kind": "draft_model", "policy": {"kind": "pre_cut"}},
    "tree": {"kind": "tree"},
    "fork": {"kind": "fork"},
    "dynamic tree": {"kind": "dynamic_tree"},
    "cascade": {"kind": "cascade"},
    "post-use": {"kind": "post_use"},
    "ouroboros": {"kind": "ouroboros"},
}


def pair_with_head(pair: Pair, **options: int) -> Pair:
    """The pair with a random head as a further draft."""
    return replace(pair, drafts={**pair.drafts, HEAD: head_of(pair, **options)})


@pytest.fixture(scope="module")
def pair(tiny_pair: Pair) -> Pair:
    return pair_with_head(tiny_pair)


def drafting(drafter: dict, sampling: Sampling | None = None) -> Configuration:
    value = {"drafter": drafter, "sampling": (sampling or Sampling()).model_dump()}
    return parse(Configuration, value, "test")


def requests(count: int = 24) -> list[Request]:
    return [Request(str(n), prompt, count, seed=n) for n, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_output_is_the_targets_own(pair: Pair, kind: str, slots: int) -> None:
    expected = [g.tokens for g in Engine(pair, AUTOREGRESSIVE).generate(requests())]
    engine = Engine(pair, drafting({**DRAFTERS[kind], "draft": HEAD}), slots)
    generations = engine.generate(requests())
    assert [g.tokens for g in generations] == expected
    assert sum(r.drafted for g in generations for r in g.rounds) > 20


TEXTS = [tuple(range(first, first + 60)) for first in (5, 40, 90)]
WRITTEN = [Request(str(n), text, 80, ignore_eos=True) for n, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def taught(tiny_pair: Pair) -> Pair:
    """The pair with a head that knows what the target writes."""
    written = Engine(tiny_pair, AUTOREGRESSIVE, 3).generate(WRITTEN)
    texts = [[*text, *own.tokens] for text, own in zip(TEXTS, written, strict=True)]
    return replace(tiny_pair, drafts={HEAD: taught_head_of(tiny_pair, texts, len(TEXTS[0]))})


@pytest.mark.parametrize("kind", ["chain", "dynamic tree"])
def test_drafts_stay_as_good_in_chunks_and_after_preemption(taught: Pair, kind: str) -> None:
    def rounds(limits: Limits) -> list[list[tuple[int, int]]]:
        engine = Engine(taught, drafting({**DRAFTERS[kind], "draft": HEAD}), limits=limits)
        found = [[(r.drafted, r.accepted) for r in g.rounds] for g in engine.generate(WRITTEN)]
        assert (engine.scheduler.preemptions > 0) == (limits.cache_tokens is not None)
        return found

    alone = rounds(Limits(1))
    assert sum(accepted for text in alone for _, accepted in text) > 120  # of 240 tokens
    assert rounds(Limits(3, step_tokens=16, cache_tokens=384)) == alone


def test_a_head_shares_the_round_with_other_drafts(pair: Pair) -> None:
    expected = [g.tokens for g in Engine(pair, AUTOREGRESSIVE).generate(requests())]
    head = {"kind": "draft_model", "draft": HEAD}
    for drafter in (
        {"kind": "bandit", "arms": [head, {"kind": "draft_model", "draft": "draft"}, "suffix"]},
        {"kind": "hybrid", "otherwise": head},
        {"kind": "hybrid", "otherwise": head, "merge": True},
    ):
        drafter["arms"] = [
            {"kind": a} if isinstance(a, str) else a for a in drafter.get("arms", [])
        ]
        given = {key: value for key, value in drafter.items() if value != []}
        assert [g.tokens for g in Engine(pair, drafting(given), 3).generate(requests())] == expected


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [
        ({"kind": "draft_model"}, Sampling(temperature=1.0)),
        ({"kind": "draft_model"}, Sampling(temperature=0.7, top_k=3)),
        ({"kind": "draft_model"}, Sampling(temperature=1.0, coupling="gumbel")),
        ({"kind": "tree", "branching": [2, 2]}, Sampling(temperature=1.0)),
        (
            {"kind": "dynamic_tree", "expand": 2, "children": 2, "keep": 5},
            Sampling(temperature=1.0),
        ),
    ],
    ids=["chain", "top-k", "coupled", "tree", "dynamic tree"],
)
def test_samples_have_the_targets_joint_distribution(drafter: dict, sampling: Sampling) -> None:
    assert fit(drafter, sampling) > 1e-3


def test_numbers_of_the_wrong_vocabulary_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    propose = Engine._draft

    def by_draft_numbers(engine: Engine, active: list) -> list[TokenTree]:
        trees = propose(engine, active)
        for tree in trees:
            tree.draft_probs = [torch.cat([q[::2], q[1::2]]) for q in tree.draft_probs]
        return trees

    monkeypatch.setattr(Engine, "_draft", by_draft_numbers)
    assert fit({"kind": "draft_model"}, Sampling(temperature=1.0)) < 1e-6


def fit(drafter: dict, sampling: Sampling) -> float:
    """How well what the engine writes fits the target's distribution of all texts."""
    pair = pair_with_head(toy_pair(), tokens=3)  # every second one
    configuration = drafting({**drafter, "draft": HEAD}, sampling)
    counts = sample_counts(pair, configuration, 4_000, length=4)
    expected = exact_distribution(pair, sampling, 4)
    return goodness_of_fit(*alike_behind_the_first(counts, expected))


@torch.inference_mode()
def test_a_head_proposes_tokens_of_its_own_vocabulary_alone(pair: Pair) -> None:
    head = pair.drafts[HEAD]
    configuration = drafting({"kind": "draft_model", "draft": HEAD}, Sampling(temperature=2.0))
    engine, proposed = Engine(pair, configuration, 3), set()
    draft = engine.drafter.propose

    def record(sequences: list) -> list[TokenTree]:
        trees = draft(sequences)
        proposed.update(token for tree in trees for token in tree.tokens)
        return trees

    engine.drafter.propose = record
    engine.generate(requests(48))
    assert len(proposed) > 20
    assert proposed <= set(head.proposable.tolist())
