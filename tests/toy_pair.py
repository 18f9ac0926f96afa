"""A pair so small that the distribution of its texts can be computed in full.

Decoding is compared with the exact probabilities of all VOCABULARY^length continuations of a
prompt.
"""

from itertools import product

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec_core.config import Configuration, PairSpec, RunnerSettings, Sampling
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.sampling import warp

VOCABULARY = 6
PROMPT = (1, 2, 1)
NEAR, FAR = "near", "far"  # drafts: the target with some noise, and an unrelated model
_NOISE = 0.5  # of each weight matrix's standard deviation
_SLOTS = 256


def toy_pair() -> Pair:
    """A target of VOCABULARY tokens and two drafts, NEAR and FAR; always the same."""
    target, near, far = _toy_model(0), _toy_model(0), _toy_model(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in near.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(_NOISE * parameter.std(correction=0) * noise)
    words = {str(token): token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    spec = PairSpec(
        target="toy",
        drafts={NEAR: "toy-near", FAR: "toy-far"},
        runner=RunnerSettings(max_length=32),
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return Pair(spec, wrapped, target, {NEAR: near, FAR: far}, compact=True)


def _toy_model(seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.6,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.eval()
    return model


@torch.inference_mode()
def exact_distribution(pair: Pair, sampling: Sampling, length: int) -> np.ndarray:
    """The target's probability (VOCABULARY^length,) of each continuation of PROMPT, in the order
    of counting."""
    outcomes = torch.tensor(list(product(range(VOCABULARY), repeat=length)))
    texts = torch.cat([torch.tensor([PROMPT] * len(outcomes)), outcomes], dim=1)
    logits = pair.target(texts).logits[:, len(PROMPT) - 1 : -1]
    probs = warp(logits, sampling).gather(2, outcomes[..., None])[..., 0]
    return probs.double().prod(dim=1).numpy()


def sample_counts(
    pair: Pair, configuration: Configuration, samples: int, length: int, seed: int = 0
) -> np.ndarray:
    """How often (VOCABULARY^length,) the engine wrote each continuation of PROMPT, in the order of
    :func:`exact_distribution`."""
    return counted(Engine(pair, configuration, slots=_SLOTS), samples, length, seed)


def counted(engine: Engine, samples: int, length: int, seed: int = 0) -> np.ndarray:
    """The same for an engine of the pair."""
    requests = [Request(str(i), PROMPT, length, seed=seed + i) for i in range(samples)]
    weights = VOCABULARY ** np.arange(length)[::-1]
    outcomes = [int(np.dot(g.tokens, weights)) for g in engine.generate(requests)]
    return np.bincount(outcomes, minlength=VOCABULARY**length)
