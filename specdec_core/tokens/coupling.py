"""Gumbel-coupled sampling: draft and target choose each token with the same noise.

For every position of a request there is one vector E of independent Exp(1) noise, a function of the
request's seed and the position alone. A model with distribution p chooses argmax p(x) / E(x), the
winner of an exponential race, which is an exact sample of p (equivalent to the Gumbel-max trick).
The target chooses so at every position, whatever the draft; a candidate is accepted when it *is*
the target's choice. So the output is one fixed sample of the target, like greedy output, and a
recorded trace of it can be replayed exactly.

The acceptance rule is equality, not rejection sampling: a candidate of the draft, which chooses
with the same E, is accepted with probability Σ_x 1 / Σ_y max(p(y)/p(x), q(y)/q(x)), at least
(1 − TV)/(1 + TV); rejection sampling reaches 1 − TV. (Daliri, Musco and Suresh, "Coupling without
communication and drafter-invariant speculative decoding", 2024.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_KEPT = 64  # positions with noise in memory: draft and target use the same
_LEAST = 1e-30  # keeps p / E finite


class SharedNoise:
    """The noise of one request, for a vocabulary of `size` tokens."""

    def __init__(self, seed: int, size: int) -> None:
        self.seed, self.size = seed, size
        self._kept: dict[int, Tensor] = {}

    def at(self, position: int) -> Tensor:
        """Exp(1) noise (size,) for the token at `position` of the text; made on the CPU, so that
        it is the same on every device."""
        noise = self._kept.get(position)
        if noise is None:
            key = hashlib.blake2b(f"{self.seed}:{position}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1)
            noise = torch.empty(self.size).exponential_(generator=generator).clamp_min_(_LEAST)
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            self._kept[position] = noise
        return noise


def scores(
    probabilities: Tensor, noises: Sequence[SharedNoise], positions: Sequence[int]
) -> Tensor:
    """p / E (n, vocabulary): each row's probabilities over its request's noise at a position of its
    text. A row chooses its largest entry."""
    entries = probabilities.shape[-1]  # a draft model may lack the target's padding entries
    places = zip(noises, positions, strict=True)
    shared = torch.stack([noise.at(position)[:entries] for noise, position in places])
    return probabilities / shared.to(probabilities.device)
