"""From logits to probabilities, and from probabilities to tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_core.config import Sampling


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities (..., vocabulary) in float32 after temperature, top-k and top-p, in this order,
    as in transformers. Top-p keeps the smallest set of most likely tokens of at least that mass.

    The temperature must not be 0: greedy decoding has no distribution.
    """
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        smallest_kept = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < smallest_kept, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        dropped = torch.zeros_like(scores, dtype=torch.bool)
        dropped.scatter_(-1, order, before >= sampling.top_p)
        scores = scores.masked_fill(dropped, -torch.inf)
    return scores.softmax(dim=-1)


def draw(probabilities: Tensor, uniform: float) -> int:
    """The token whose slice of the cumulative distribution (vocabulary,) holds `uniform` in [0, 1).

    The weights need not sum to 1. A token of weight 0 is never drawn.
    """
    cumulative = probabilities.double().cumsum(0)
    return int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))


class RandomStream:
    """A request's own uniform numbers: what it draws does not depend on who shares its batch."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def uniform(self) -> float:
        """The next number in [0, 1)."""
        return torch.rand((), generator=self._generator, dtype=torch.float64).item()
