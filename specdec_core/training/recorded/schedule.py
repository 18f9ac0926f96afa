"""Which texts make which batch, and the learning rate: functions of the place in the training, so
that one which was interrupted goes on as if it had not been."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

# Texts of about the same length share a batch: those of so many batches are sorted.
_WINDOW = 512


def plan_epoch(
    texts: Sequence[int], lengths: Mapping[int, int], batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """The texts of each batch of an epoch, each text once. With its padding a batch has at most
    `batch_tokens` tokens of answers, or is one text."""
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(np.asarray(texts)).tolist()
    batches: list[list[int]] = []
    for first in range(0, len(order), _WINDOW):
        batch: list[int] = []
        for text in sorted(order[first : first + _WINDOW], key=lengths.__getitem__):
            if batch and (len(batch) + 1) * lengths[text] > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(text)
        batches.append(batch)
    return [batches[number] for number in random.permutation(len(batches))]


def rate(share: float, warmup: float) -> float:
    """The learning rate over its peak, at a share of the training."""
    if share < warmup:
        return (share + 1e-3) / (warmup + 1e-3)
    return (1 + math.cos(math.pi * (share - warmup) / (1 - warmup))) / 2
