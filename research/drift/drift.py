"""How far decoding drifts from the target: lossy methods lose quality, lossless ones do not.

The target scores a configuration's texts and its own (the quality loss of improved MCSD, Table 1,
without a judge).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec_core.config import Configuration
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.sampling import tempered
from specdec_core.tokens.statistics import Counts, Generation

_DRAWS = 2000
_SCORED_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number from samples and its 95 % interval."""

    value: float
    low: float
    high: float

    def columns(self, name: str) -> dict[str, float]:
        """The columns of a table that show it as `name` with its interval."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


@dataclass(frozen=True)
class Written:
    """A configuration's texts for some prompts, scored by the target."""

    counts: Counts
    log_likelihood: np.ndarray  # (prompts,) summed over a prompt's texts, nats
    agreeing: np.ndarray  # (prompts,) tokens that are the target's most likely ones, likewise
    tokens: np.ndarray  # (prompts,) likewise

    def interval(self) -> Estimate:
        """The log-likelihood a token, nats, and its bootstrap interval over prompts."""
        return bootstrap(self._means, len(self.tokens))

    def against(self, other: Written) -> Estimate:
        """The log-likelihood a token less that of `other`'s texts for the same prompts; the
        bootstrap interval keeps prompts paired."""
        return bootstrap(lambda pick: self._means(pick) - other._means(pick), len(self.tokens))

    def agreement(self) -> Estimate:
        """The share of tokens that the target itself would have chosen greedily."""
        return bootstrap(lambda pick: self._means(pick, self.agreeing), len(self.tokens))

    def _means(self, pick: np.ndarray, sums: np.ndarray | None = None) -> np.ndarray:
        sums = self.log_likelihood if sums is None else sums
        return np.asarray(sums[pick].sum(axis=-1) / self.tokens[pick].sum(axis=-1))


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], prompts: int) -> Estimate:
    """`statistic` of prompts by their numbers (draws, prompts), and its 95 % interval over
    resampled prompts."""
    picks = np.random.default_rng(0).integers(prompts, size=(_DRAWS, prompts))
    low, high = np.percentile(statistic(picks), [2.5, 97.5])
    [value] = statistic(np.arange(prompts)[None])
    return Estimate(float(value), float(low), float(high))


def write(
    pair: Pair,
    configuration: Configuration,
    prompts: Sequence[tuple[int, ...]],
    texts: int,
    max_new_tokens: int,
    slots: int = 8,
    on_finish: Callable[[Generation], None] | None = None,
) -> Written:
    """Let `configuration` write `texts` texts for each of `prompts` (tokens) and score them."""
    requests = [
        Request(f"{number}/{text}", prompt, max_new_tokens, seed=number * texts + text)
        for number, prompt in enumerate(prompts)
        for text in range(texts)
    ]
    generations = Engine(pair, configuration, slots).generate(requests, on_finish)
    scores, agreeing = scored(
        pair,
        [(r.tokens, g.tokens) for r, g in zip(requests, generations, strict=True)],
        configuration.sampling.temperature,
    )
    lengths = np.array([len(g.tokens) for g in generations])
    shape = (len(prompts), texts)
    return Written(
        Counts.of(generations),
        np.array(scores).reshape(shape).sum(axis=1),
        np.array(agreeing).reshape(shape).sum(axis=1),
        lengths.reshape(shape).sum(axis=1),
    )


@torch.inference_mode()
def scored(
    pair: Pair, texts: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float
) -> tuple[list[float], list[int]]:
    """The target's log-likelihood in nats, at `temperature`, of each output after its prompt, and
    how many of its tokens are the target's most likely ones.

    Without top-k and top-p: tokens that they cut off have no finite logarithm, and rounding decides
    at the border.
    """
    likelihoods, agreeing = [], []
    for start in range(0, len(texts), _SCORED_TOGETHER):
        group = texts[start : start + _SCORED_TOGETHER]
        longest = max(len(prompt) + len(output) for prompt, output in group)
        # Attention is causal, so padding at the end needs no mask.
        ids = torch.tensor([[*p, *o, *[0] * (longest - len(p) - len(o))] for p, o in group])
        logits = pair.target(input_ids=ids.to(pair.target.device)).logits
        for row, (prompt, output) in enumerate(group):
            of_output = logits[row, len(prompt) - 1 : len(prompt) + len(output) - 1]
            scores = tempered(of_output, temperature).log_softmax(dim=-1)
            chosen = torch.tensor(list(output), device=scores.device)[:, None]
            likelihoods.append(float(scores.gather(1, chosen).sum()))
            agreeing.append(int((scores.argmax(dim=-1) == chosen[:, 0]).sum()))
    return likelihoods, agreeing
