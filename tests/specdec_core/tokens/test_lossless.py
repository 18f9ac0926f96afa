"""Sampled output has the target's distribution: exactly enumerated, then compared with samples.

8,000 samples find, 99 times in 100, what differs by a χ² divergence of 0.023 (a total variation of
some 0.07), 30,000 what differs by 0.009. The errors put in here are all found at p < 1e-9.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import LlamaForCausalLM

from research.drift import toy_pair as toy
from research.drift.toy_pair import VOCABULARY as VOCAB
from research.drift.toy_pair import exact_distribution, sample_counts
from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.svip import SvipSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.drafting.tree.settings import ForkSettings, TreeSettings
from specdec_core.models.pair import Pair
from specdec_core.tokens import acceptance, topology
from specdec_core.tokens import verification as verify
from specdec_core.tokens.sampling import RandomStream, draw_siblings
from specdec_core.tokens.statistics import TokenOrigin
from specdec_core.tokens.token_tree import ROOT, TokenTree
from tests.specdec_core.fits import alike_behind_the_first
from tests.specdec_core.models.reduced_draft.drafts import draft_of

LENGTH = 4  # the first token has no candidates
joint = partial(exact_distribution, length=LENGTH)
engine_counts = partial(sample_counts, length=LENGTH)
counted = partial(toy.counted, length=LENGTH)


@pytest.fixture(scope="module")
def toy_pair() -> Pair:
    """With a draft that is unlike its target."""
    pair = toy.toy_pair()
    return replace(pair, drafts={"toy": pair.drafts[toy.FAR]})


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square goodness of fit; cells expected less than 10 times are pooled, of texts first
    those alike behind the first token. A cell that cannot happen must not."""
    assert not counts[expected == 0].any(), "a token of probability 0 was generated"
    if len(expected) == VOCAB**LENGTH:
        counts, expected = alike_behind_the_first(counts, expected)
    expected = expected * counts.sum()
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    keep = wanted > 0
    return float(chisquare(observed[keep], wanted[keep] / wanted.sum() * observed.sum()).pvalue)


CHAIN = DraftModelSettings(policy=FixedSettings(max_tokens=2))


def test_chain_samples_have_the_targets_joint_distribution(toy_pair: Pair) -> None:
    configuration = Configuration(drafter=CHAIN, sampling=Sampling(temperature=1.0))
    counts = engine_counts(toy_pair, configuration, 30_000)
    assert p_value(counts, joint(toy_pair, configuration.sampling)) > 1e-3


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [
        (CHAIN, Sampling(temperature=0.7, top_k=3)),
        (CHAIN, Sampling(temperature=1.3, top_p=0.8)),
        (DraftModelSettings(policy=SvipSettings(threshold=1.2)), Sampling(temperature=1.0)),
        (PromptLookupSettings(), Sampling(temperature=1.0)),
        (None, Sampling(temperature=1.0)),
    ],
    ids=["top-k", "top-p", "svip", "prompt-lookup", "autoregressive"],
)
def test_every_drafter_and_warper_is_lossless(
    toy_pair: Pair, drafter: object, sampling: Sampling
) -> None:
    configuration = Configuration(drafter=drafter, sampling=sampling)
    counts = engine_counts(toy_pair, configuration, 8_000)
    assert p_value(counts, joint(toy_pair, sampling)) > 1e-3


@pytest.mark.parametrize("bug", ["no-residual", "swapped-residual"])
def test_the_test_notices_a_wrong_residual(
    toy_pair: Pair, monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    def wrong(p: torch.Tensor, token: int, q: torch.Tensor) -> torch.Tensor:
        if bug == "no-residual":
            return p
        left = (q - p).clamp(min=0)  # as SVIP's Algorithm 4 is printed
        return left / left.sum()

    monkeypatch.setattr(verify, "residual", wrong)
    configuration = Configuration(drafter=CHAIN, sampling=Sampling(temperature=1.0))
    counts = engine_counts(toy_pair, configuration, 8_000)
    assert p_value(counts, joint(toy_pair, configuration.sampling)) < 1e-9


@pytest.mark.parametrize("replacement", [False, True])
def test_siblings_are_verified_losslessly(replacement: bool) -> None:
    """A tree's first level of three siblings, drawn with and without replacement."""
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.1, 0.0])
    q = torch.tensor([0.05, 0.5, 0.2, 0.0, 0.05, 0.2])
    counts = np.zeros(VOCAB, dtype=int)
    for seed in range(8_000):
        tree, left = TokenTree(), q
        for _ in range(3):
            token = int(torch.multinomial(left, 1, generator=generator))
            tree.add(token, ROOT, TokenOrigin.DRAFT, left)
            if not replacement:
                left = left.clone()
                left[token] = 0
                left = left / left.sum()
        verdict = verify.verify_sampled(tree, p.repeat(4, 1), RandomStream(seed, VOCAB))
        counts[tree.tokens[verdict.path[0]] if verdict.path else verdict.token] += 1
    assert p_value(counts, p.numpy().astype(float)) > 1e-3


# On trees: more of a round is drawn, tried and subtracted than in a chain.

WARPERS = {
    "plain": Sampling(temperature=1.0),
    "top-k": Sampling(temperature=0.7, top_k=3),
    "top-p": Sampling(temperature=1.3, top_p=0.8),
    "coupled": Sampling(temperature=1.0, coupling="gumbel"),
}
SHAPES = {
    "3x2x1": TreeSettings(branching=(3, 2, 1)),
    "3x2x1-replaced": TreeSettings(branching=(3, 2, 1), replacement=True),
    "1x4": TreeSettings(branching=(1, 4)),
    "uneven": TreeSettings(branching=(3, (2, 0, 1))),
    "everything": TreeSettings(branching=(VOCAB,)),
    "fork": ForkSettings(width=2, policy=SvipSettings(threshold=1.25, max_tokens=3)),
}


def tree_p_value(pair: Pair, drafter: object, sampling: Sampling, samples: int) -> float:
    configuration = Configuration(drafter=drafter, sampling=sampling)
    return p_value(engine_counts(pair, configuration, samples), joint(pair, sampling))


@pytest.mark.parametrize("warper", WARPERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_of_every_shape_are_lossless(toy_pair: Pair, shape: str, warper: str) -> None:
    assert tree_p_value(toy_pair, SHAPES[shape], WARPERS[warper], 2_500) > 1e-3


@pytest.mark.parametrize("replacement", [False, True])
def test_tree_samples_have_the_targets_joint_distribution(
    toy_pair: Pair, replacement: bool
) -> None:
    drafter = TreeSettings(branching=(3, 2, 1), replacement=replacement)
    assert tree_p_value(toy_pair, drafter, Sampling(temperature=1.0), 8_000) > 1e-3


@pytest.fixture(scope="module")
def holes(toy_pair: Pair) -> Pair:
    """The target never writes 0 or 3, the draft never 3, 4 or 5."""

    def without(model: LlamaForCausalLM, tokens: list[int]) -> LlamaForCausalLM:
        copy = deepcopy(model)
        copy.lm_head = torch.nn.Linear(8, VOCAB)
        copy.lm_head.weight = model.lm_head.weight
        copy.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB))
        with torch.no_grad():
            copy.lm_head.bias[tokens] = -1e4
        return copy

    target, draft = without(toy_pair.target, [0, 3]), without(toy_pair.drafts["toy"], [3, 4, 5])
    return replace(toy_pair, target=target, drafts={"toy": draft})


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_that_only_one_model_knows_do_no_harm(holes: Pair, shape: str) -> None:
    """With fewer possible tokens than children, too."""
    probs = joint(holes, Sampling(temperature=1.0))
    assert 0 < np.count_nonzero(probs) <= 4**LENGTH
    assert tree_p_value(holes, SHAPES[shape], Sampling(temperature=1.0), 2_500) > 1e-3


@pytest.fixture(scope="module")
def reduced(toy_pair: Pair) -> Pair:
    """The draft has an output layer over three of the tokens."""
    draft = draft_of(toy_pair.target.config, [1, 2, 4], seed=1)
    return Pair(toy_pair.spec, toy_pair.tokenizer, toy_pair.target, {"toy": draft})


@pytest.mark.parametrize("warper", WARPERS)
@pytest.mark.parametrize("drafter", [CHAIN, SHAPES["3x2x1"]], ids=["chain", "tree"])
def test_drafts_with_a_reduced_vocabulary_are_lossless(
    reduced: Pair, drafter: object, warper: str
) -> None:
    assert tree_p_value(reduced, drafter, WARPERS[warper], 4_000) > 1e-3


@pytest.mark.parametrize("drafter", [CHAIN, SHAPES["3x2x1"]], ids=["chain", "tree"])
def test_the_test_notices_tokens_drawn_as_if_the_draft_had_them_all(
    reduced: Pair, monkeypatch: pytest.MonkeyPatch, drafter: object
) -> None:
    monkeypatch.setattr(verify, "residual", lambda p, token, q: p)
    assert tree_p_value(reduced, drafter, Sampling(temperature=1.0), 8_000) < 1e-9


def raw_rest(q: Tensor, uniforms: list, replacement: bool) -> tuple[list, list[Tensor]]:
    """Siblings carry what the ones before left of q, but not made to sum to 1."""
    tokens, sources = draw_siblings(q, uniforms, replacement)
    for n in range(1, len(sources)):
        sources[n] = torch.where(sources[n] > 0, q, 0)
    return tokens, sources


def first_for_all(q: Tensor, uniforms: list, replacement: bool) -> tuple[list, list[Tensor]]:
    """Siblings drawn without replacement carry q as if drawn with it."""
    tokens, sources = draw_siblings(q, uniforms, replacement)
    return tokens, [q] * len(sources)


def others_place(q: Tensor, uniforms: list, replacement: bool) -> tuple[list, list[Tensor]]:
    """The children of one node carry the distribution of another's."""
    tokens, sources = draw_siblings(q, uniforms, replacement)
    return tokens, [source.roll(1, dims=0) for source in sources]


@pytest.mark.parametrize("bug", [raw_rest, first_for_all, others_place])
def test_the_test_notices_siblings_with_a_wrong_distribution(
    toy_pair: Pair, monkeypatch: pytest.MonkeyPatch, bug: object
) -> None:
    monkeypatch.setattr(acceptance, "draw_siblings", bug)
    drafter = TreeSettings(branching=(3, 2))
    assert tree_p_value(toy_pair, drafter, Sampling(temperature=1.0), 4_000) < 1e-9


@pytest.mark.long
def test_the_test_notices_a_wrong_mask(toy_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes see all nodes before them, as in a chain, in the target."""

    class Chained(topology.Topology):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            self._sees = np.tril(np.ones((len(self), len(self)), dtype=bool))

    monkeypatch.setattr(topology, "Topology", Chained)
    drafter = TreeSettings(branching=(3, 2))
    pair = replace(toy_pair, compact=False)  # torch's attention, which reads the mask
    assert tree_p_value(pair, drafter, Sampling(temperature=1.0), 20_000) < 1e-9


@pytest.mark.parametrize("replacement", [False, True])
def test_siblings_are_drawn_as_they_say(replacement: bool) -> None:
    """The second and third token have the distribution that they carry, given the ones before."""
    q = torch.tensor([[0.05, 0.5, 0.2, 0.0, 0.05, 0.2]])
    stream, counts = RandomStream(0, VOCAB), np.zeros((VOCAB, VOCAB), dtype=int)
    for _ in range(4_000):
        [tokens], sources = draw_siblings(q, [[stream.uniform() for _ in range(3)]], replacement)
        counts[tokens[0], tokens[1]] += 1
        expected = q[0].clone()
        for token, source in zip(tokens, sources, strict=True):
            torch.testing.assert_close(source[0], expected)
            if not replacement:
                expected[token] = 0
                expected /= expected.sum()
    first = q[0].double().numpy()
    exact = np.outer(first, first)
    if not replacement:
        np.fill_diagonal(exact, 0)
        exact /= np.maximum(1 - first, 1e-9)[:, None]
    assert p_value(counts.ravel(), exact.ravel()) > 1e-3


def test_a_row_runs_out_of_siblings_with_its_tokens() -> None:
    q = torch.tensor([[0.0, 0.5, 0.0, 0.5], [0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 1.0, 0.0]])
    tokens, _ = draw_siblings(q, [[0.3] * 3, [0.3] * 4, [0.999999]])
    assert sorted(tokens[0]) == [1, 3]
    assert sorted(tokens[1]) == [0, 1, 2, 3]
    assert tokens[2] == [2]
