"""How sure a model is of the token that it finds most likely."""

from __future__ import annotations

from torch import Tensor


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely tokens (...) by `logits` (..., vocabulary), and their probabilities (...) at
    temperature 1 in float32, 1 / Σ exp(l − max l): compiled, one pass over the logits, where a
    softmax is written and read again."""
    largest = logits.max(dim=-1)
    below = logits.float() - largest.values.float()[..., None]
    return largest.indices, below.exp().sum(dim=-1).reciprocal()
