"""Sampled output has the target's distribution: exactly enumerated, then compared with samples. The
errors put in here are all found at p < 1e-9."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from specdec_core.config import Sampling
from specdec_core.models.pair import Pair
from specdec_core.tokens import acceptance, topology
from specdec_core.tokens import verification as verify
from specdec_core.tokens.sampling import draw_siblings
from tests import toy_pair as toy
from tests.specdec_core.fits import LENGTH, fit
from tests.specdec_core.kinds import chain
from tests.specdec_core.models.reduced_draft.drafts import draft_of
from tests.toy_pair import VOCABULARY as VOCAB
from tests.toy_pair import exact_distribution

joint = partial(exact_distribution, length=LENGTH)

counted = partial(toy.counted, length=LENGTH)


@pytest.fixture(scope="module")
def toy_pair():
    """With a draft that is unlike its target."""
    pair = toy.toy_pair()
    return replace(pair, drafts={"toy": pair.drafts[toy.FAR]})


CHAIN = chain(max_tokens=2)


PLAIN, TOP_K = Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=3)
TOP_P, COUPLED = Sampling(temperature=1.3, top_p=0.8), Sampling(temperature=1.0, coupling="gumbel")


@pytest.mark.parametrize(
    ("drafter", "sampling", "samples"),
    [
        (CHAIN, TOP_K, 4_000),
        (CHAIN, TOP_P, 4_000),
        (None, PLAIN, 4_000),
        # Finds, 99 times in 100, what differs by a χ² divergence of 0.009.
        pytest.param(CHAIN, PLAIN, 30_000, marks=pytest.mark.long),
    ],
    ids=["top-k", "top-p", "autoregressive", "plain"],
)
def test_chains_are_lossless(toy_pair, drafter, sampling, samples):
    assert fit(drafter, sampling, samples, toy_pair) > 1e-3


@pytest.mark.parametrize("bug", ["no-residual", "swapped-residual"])
def test_the_test_notices_a_wrong_residual(toy_pair, monkeypatch, bug):
    def wrong(p, token, q):
        if bug == "no-residual":
            return p
        left = (q - p).clamp(min=0)  # as SVIP's Algorithm 4 is printed
        return left / left.sum()

    monkeypatch.setattr(verify, "residual", wrong)
    assert fit(CHAIN, PLAIN, 4_000, toy_pair) < 1e-9


# On trees: more of a round is drawn, tried and subtracted than in a chain.


def tree(*branching):
    return {"kind": "tree", "branching": branching}


STOPS = {"kind": "svip", "threshold": 1.25, "max_tokens": 3}
SHAPES: dict[str, dict[str, Any]] = {
    "3x2x1": tree(3, 2, 1),
    "3x2x1-replaced": tree(3, 2, 1) | {"replacement": True},
    "1x4": tree(1, 4),
    "uneven": tree(3, (2, 0, 1)),
    "everything": tree(VOCAB),
    "fork": {"kind": "fork", "width": 2, "policy": STOPS},
}


@pytest.mark.parametrize(
    ("shape", "sampling"),
    [
        *(("3x2x1", PLAIN), ("3x2x1-replaced", TOP_P), ("1x4", PLAIN), ("uneven", TOP_K)),
        *(("everything", PLAIN), ("fork", TOP_K), ("3x2x1", COUPLED)),
    ],
)
def test_trees_of_every_shape_are_lossless(toy_pair, shape, sampling):
    assert fit(SHAPES[shape], sampling, pair=toy_pair) > 1e-3


@pytest.fixture(scope="module")
def holes(toy_pair):
    """The target never writes 0 or 3, the draft never 3, 4 or 5."""

    def without(model, tokens):
        copy = deepcopy(model)
        copy.lm_head = torch.nn.Linear(8, VOCAB)
        copy.lm_head.weight = model.lm_head.weight
        copy.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB))
        with torch.no_grad():
            copy.lm_head.bias[tokens] = -1e4
        return copy

    target, draft = without(toy_pair.target, [0, 3]), without(toy_pair.drafts["toy"], [3, 4, 5])
    return replace(toy_pair, target=target, drafts={"toy": draft})


@pytest.mark.parametrize("shape", ["3x2x1", "3x2x1-replaced", "everything"])
def test_tokens_that_only_one_model_knows_do_no_harm(holes, shape):
    """With fewer possible tokens than children, too."""
    probs = exact_distribution(holes, PLAIN, LENGTH)
    assert 0 < np.count_nonzero(probs) <= 4**LENGTH
    assert fit(SHAPES[shape], PLAIN, pair=holes) > 1e-3


@pytest.fixture(scope="module")
def reduced(toy_pair):
    """The draft has an output layer over three of the tokens."""
    draft = draft_of(toy_pair.target.config, [1, 2, 4], seed=1)
    return Pair(toy_pair.spec, toy_pair.tokenizer, toy_pair.target, {"toy": draft})


@pytest.mark.parametrize(
    ("drafter", "sampling"), [(CHAIN, TOP_K), (SHAPES["3x2x1"], PLAIN)], ids=["chain", "tree"]
)
def test_drafts_with_a_reduced_vocabulary_are_lossless(reduced, drafter, sampling):
    assert fit(drafter, sampling, pair=reduced) > 1e-3


def test_the_test_notices_tokens_drawn_as_if_the_draft_had_them_all(reduced, monkeypatch):
    monkeypatch.setattr(verify, "residual", lambda p, token, q: p)
    assert fit(SHAPES["3x2x1"], PLAIN, pair=reduced) < 1e-9


def raw_rest(q, uniforms, replacement):
    """Siblings carry what the ones before left of q, but not made to sum to 1."""
    tokens, sources = draw_siblings(q, uniforms, replacement)
    for n in range(1, len(sources)):
        sources[n] = torch.where(sources[n] > 0, q, 0)
    return tokens, sources


def first_for_all(q, uniforms, replacement):
    """Siblings drawn without replacement carry q as if drawn with it."""
    tokens, sources = draw_siblings(q, uniforms, replacement)
    return tokens, [q] * len(sources)


def others_place(q, uniforms, replacement):
    """The children of one node carry the distribution of another's."""
    tokens, sources = draw_siblings(q, uniforms, replacement)
    return tokens, [source.roll(1, dims=0) for source in sources]


@pytest.mark.parametrize("bug", [raw_rest, first_for_all, others_place])
def test_the_test_notices_siblings_with_a_wrong_distribution(toy_pair, monkeypatch, bug):
    monkeypatch.setattr(acceptance, "draw_siblings", bug)
    assert fit(tree(3, 2), PLAIN, pair=toy_pair) < 1e-9


@pytest.mark.long
def test_the_test_notices_a_wrong_mask(toy_pair, monkeypatch):
    """Nodes see all nodes before them, as in a chain, in the target."""

    class Chained(topology.Topology):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self._sees = np.tril(np.ones((len(self), len(self)), dtype=bool))

    monkeypatch.setattr(topology, "Topology", Chained)
    pair = replace(toy_pair, compact=False)  # torch's attention, which reads the mask
    assert fit(tree(3, 2), PLAIN, 20_000, pair) < 1e-9


def test_a_row_runs_out_of_siblings_with_its_tokens():
    q = torch.tensor([[0.0, 0.5, 0.0, 0.5], [0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 1.0, 0.0]])
    tokens, _ = draw_siblings(q, [[0.3] * 3, [0.3] * 4, [0.999999]])
    assert sorted(tokens[0]) == [1, 3]
    assert sorted(tokens[1]) == [0, 1, 2, 3]
    assert tokens[2] == [2]
