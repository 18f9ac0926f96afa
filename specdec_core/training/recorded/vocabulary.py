"""The draft vocabulary: the tokens that the target writes most often."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def count_tokens(answers: Iterable[list[int]], vocab_size: int) -> Tensor:
    """How often each token is in the answers, (vocabulary,)."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for answer in answers:
        counts += torch.bincount(torch.tensor(answer, dtype=torch.long), minlength=vocab_size)
    return counts


def draft_vocabulary(counts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The `size` most frequent tokens, increasing (size,); of equally frequent ones those with the
    lower number. Those that end a text are `always` among them."""
    ranks = counts.clone()
    ranks[list(always)] = int(counts.sum()) + 1
    order = torch.argsort(ranks, descending=True, stable=True)
    return order[:size].sort().values


def coverage(counts: Tensor, tokens: Tensor) -> float:
    """The share of all counted tokens that these are."""
    return float(counts[tokens].sum() / counts.sum().clamp(min=1))
