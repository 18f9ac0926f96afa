"""From logits to probabilities, and from probabilities to tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_core.config import Sampling
from specdec_core.coupling import SharedNoise


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


def warp_rows(logits: Tensor, samplings: Sequence[Sampling]) -> list[Tensor | None]:
    """Each row of `logits` (rows, ..., vocabulary) warped by its own sampling; None where greedy.
    Rows that sample alike are warped together."""
    rows: dict[Sampling, list[int]] = {}
    for row, sampling in enumerate(samplings):
        rows.setdefault(sampling, []).append(row)
    warped: list[Tensor | None] = [None] * len(samplings)
    for sampling, own in rows.items():
        if not sampling.greedy:
            probs = warp(logits if len(own) == len(samplings) else logits[own], sampling)
            for row, row_probs in zip(own, probs, strict=True):
                warped[row] = row_probs
    return warped


def draw(probabilities: Tensor, uniforms: Sequence[float]) -> list[int]:
    """For each row of `probabilities` (rows, vocabulary) the token whose slice of the cumulative
    distribution holds that row's uniform number in [0, 1).

    The weights need not sum to 1. A token of weight 0 is never drawn.
    """
    cumulative = probabilities.double().cumsum(-1)
    scaled = torch.tensor(uniforms, dtype=torch.float64).to(cumulative.device)[:, None]
    return torch.searchsorted(cumulative, scaled * cumulative[:, -1:], right=True)[:, 0].tolist()


class RandomStream:
    """A request's own randomness: what it draws does not depend on who shares its batch.

    `uniform()` is its next uniform number, `noise` what coupled sampling shares between models.
    """

    def __init__(self, seed: int) -> None:
        self.uniform = random.Random(seed).random
        self.noise = SharedNoise(seed)
