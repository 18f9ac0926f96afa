"""Sampled output has the target's distribution: exactly enumerated, then compared with samples."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec_core import verify
from specdec_core.config import (
    Configuration,
    DraftModelDrafter,
    FixedPolicy,
    PairSpec,
    PromptLookupDrafter,
    RunnerSettings,
    Sampling,
    SvipPolicy,
)
from specdec_core.engine import Engine, Request
from specdec_core.pair import Pair
from specdec_core.sampling import RandomStream, warp
from specdec_core.stats import Origin
from specdec_core.token_tree import ROOT, TokenTree

VOCAB, LENGTH = 6, 3
PROMPT = (1, 2, 1)


def toy_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.6,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def toy_pair() -> Pair:
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    spec = PairSpec(target="toy", drafts={"toy": "toy"}, runner=RunnerSettings(max_length=32))
    return Pair(spec, tokenizer, toy_model(0), {"toy": toy_model(1)})


@torch.inference_mode()
def joint(pair: Pair, sampling: Sampling) -> np.ndarray:
    """The target's probability of each of the VOCAB^LENGTH continuations of the prompt."""
    outcomes = torch.tensor(list(product(range(VOCAB), repeat=LENGTH)))
    texts = torch.cat([torch.tensor([PROMPT] * len(outcomes)), outcomes], dim=1)
    logits = pair.target(texts).logits[:, len(PROMPT) - 1 : -1]
    probs = warp(logits, sampling).gather(2, outcomes[..., None])[..., 0]
    return probs.double().prod(dim=1).numpy()


def engine_counts(pair: Pair, configuration: Configuration, samples: int) -> np.ndarray:
    """How often the engine wrote each continuation."""
    engine = Engine(pair, configuration, slots=256)
    requests = [Request(str(i), PROMPT, LENGTH, seed=i) for i in range(samples)]
    weights = VOCAB ** np.arange(LENGTH)[::-1]
    outcomes = [int(np.dot(g.tokens, weights)) for g in engine.generate(requests)]
    return np.bincount(outcomes, minlength=VOCAB**LENGTH)


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square goodness of fit; cells expected less than 10 times are pooled. A cell that cannot
    happen must not."""
    assert not counts[expected == 0].any(), "a token of probability 0 was generated"
    expected = expected * counts.sum()
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    keep = wanted > 0
    return float(chisquare(observed[keep], wanted[keep] / wanted.sum() * observed.sum()).pvalue)


CHAIN = DraftModelDrafter(policy=FixedPolicy(max_tokens=2))


def test_chain_samples_have_the_targets_joint_distribution(toy_pair: Pair) -> None:
    configuration = Configuration(drafter=CHAIN, sampling=Sampling(temperature=1.0))
    counts = engine_counts(toy_pair, configuration, 100_000)
    assert p_value(counts, joint(toy_pair, configuration.sampling)) > 1e-3


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [
        (CHAIN, Sampling(temperature=0.7, top_k=3)),
        (CHAIN, Sampling(temperature=1.3, top_p=0.8)),
        (DraftModelDrafter(policy=SvipPolicy(threshold=1.2)), Sampling(temperature=1.0)),
        (PromptLookupDrafter(), Sampling(temperature=1.0)),
        (None, Sampling(temperature=1.0)),
    ],
    ids=["top-k", "top-p", "svip", "prompt-lookup", "autoregressive"],
)
def test_every_drafter_and_warper_is_lossless(
    toy_pair: Pair, drafter: object, sampling: Sampling
) -> None:
    configuration = Configuration(drafter=drafter, sampling=sampling)
    counts = engine_counts(toy_pair, configuration, 20_000)
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
    counts = engine_counts(toy_pair, configuration, 20_000)
    assert p_value(counts, joint(toy_pair, configuration.sampling)) < 1e-9


@pytest.mark.parametrize("replacement", [False, True])
def test_siblings_are_verified_losslessly(replacement: bool) -> None:
    """A tree's first level of three siblings, drawn with and without replacement."""
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.1, 0.0])
    q = torch.tensor([0.05, 0.5, 0.2, 0.0, 0.05, 0.2])
    counts = np.zeros(VOCAB, dtype=int)
    for seed in range(20_000):
        tree, left = TokenTree(), q
        for _ in range(3):
            token = int(torch.multinomial(left, 1, generator=generator))
            tree.add(token, ROOT, Origin.DRAFT, left)
            if not replacement:
                left = left.clone()
                left[token] = 0
                left = left / left.sum()
        verdict = verify.verify_sampled(tree, p.repeat(4, 1), RandomStream(seed))
        counts[tree.tokens[verdict.path[0]] if verdict.path else verdict.token] += 1
    assert p_value(counts, p.numpy().astype(float)) > 1e-3
