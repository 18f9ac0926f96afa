"""Networks that predict whether a candidate token will be accepted.

Every head maps features of a candidate to a logit; the sigmoid is the predicted acceptance
probability. Features are standardised by the training set's mean and deviation, which belong to
the weights.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HeadKind = Literal["specdecpp", "t1", "t2", "joint"]


class Head(nn.Module):
    """Features (n, f) in, logits (n,) out."""

    dropout = 0.0  # in training, of hidden states and hidden layers
    mean: Tensor
    scale: Tensor

    def __init__(
        self, features: int, widths: list[int], hidden_size: int = 0, residual: bool = False
    ) -> None:
        """Hidden layers of `widths`, `residual` or not, and a final linear layer to one logit. The
        first `hidden_size` features are a hidden state."""
        super().__init__()
        self.hidden_size, self.residual = hidden_size, residual
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        sizes = [features, *widths]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.output = nn.Linear(sizes[-1], 1)

    def standardise(self, features: Tensor) -> None:
        """Take mean and deviation from the training features (n, f)."""
        self.mean.copy_(features.mean(dim=0))
        self.scale.copy_(1 / features.std(dim=0, correction=0).clamp(min=1e-6))

    def forward(self, features: Tensor) -> Tensor:
        h = (features - self.mean) * self.scale
        if self.training and self.dropout:
            state, rest = h[:, : self.hidden_size], h[:, self.hidden_size :]
            h = torch.cat([F.dropout(state, self.dropout), rest], dim=-1)
        for layer in self.layers:
            z = F.silu(layer(h)) if self.residual else F.relu(layer(h))
            z = F.dropout(z, self.dropout, self.training)
            h = h + z if self.residual else z
        logits: Tensor = self.output(h)
        return logits.squeeze(-1)


def build_head(
    kind: HeadKind, hidden_size: int, top_k: int, depth: int = 0, width: int = 0
) -> Head:
    """An untrained head. `depth` is for specdecpp, `width` for the decision models.

    specdecpp: SpecDec++'s (D + 1)-layer ResNet (§5.1), D blocks h ← h + SiLU(W h + b), each with
    separate weights, and a linear layer. It reads e_i, the draft's last hidden state of the
    candidate y_i itself, (n, hidden_size).

    t1: improved MCSD's decision model T1 (§3.3), a three-layer MLP on the hidden state that y_i was
    drawn from, (n, hidden_size).

    t2: improved MCSD's decision model T2 (§3.3), a two-layer MLP on the k largest probabilities of
    q_i and its entropy, (n, k + 1).

    joint: T1 and T2 in one, a three-layer MLP on hidden state, top-k probabilities and entropy,
    (n, hidden_size + k + 1). From no paper: T1 and T2 each lack the other's input.
    """
    if kind == "specdecpp":
        return Head(hidden_size, [hidden_size] * depth, hidden_size, residual=True)
    if kind == "t1":
        return Head(hidden_size, [width, width], hidden_size)
    if kind == "t2":
        return Head(top_k + 1, [width])
    return Head(hidden_size + top_k + 1, [width, width], hidden_size)


def join_features(
    kind: HeadKind,
    hidden: Tensor | None = None,
    top_probs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Tensor:
    """The features (n, f) that a head of this kind reads: specdecpp the state `hidden`
    (n, hidden_size) of the candidate itself, t1 and joint the state that it was drawn from, t2 and
    joint `top_probs` (n, k) descending, and `entropy` (n,) in nats. What the kind does not read may
    be left out."""
    if kind in ("specdecpp", "t1"):
        assert hidden is not None
        return hidden
    assert top_probs is not None
    assert entropy is not None
    parts = [top_probs, entropy.unsqueeze(-1)]
    if kind == "joint":
        assert hidden is not None
        parts.insert(0, hidden.to(top_probs))
    return torch.cat(parts, dim=-1)
