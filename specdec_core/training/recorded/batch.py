"""Texts side by side, with what the target has computed of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TextBatch:
    """Prompts with their answers, padded on the right.

    The tokens of an answer whose next token is known are numbered from 0; of text b there are
    `lengths[b]`.

    Attributes:
        tokens: (b, n).
        features: of the tokens but the last (b, n - 1, layers · width); of width 0 where they were
            not asked for.
        prompts: the length of each prompt (b,).
        lengths: of each answer, less one (b,).
        last: what the target's output layer reads after those tokens (b, longest, width).
        normaliser: logsumexp of the target's logits there (b, longest).
        best: the target's most likely next token (b, longest).
        temperatures: at which each answer was decoded (b,).
    """

    tokens: Tensor
    features: Tensor
    prompts: Tensor
    lengths: Tensor
    last: Tensor
    normaliser: Tensor
    best: Tensor
    temperatures: Tensor

    @property
    def chains(self) -> int:
        """The most chains of a text: one a token whose next one is known."""
        return self.last.shape[1]

    @property
    def answered(self) -> Tensor:
        """Which of (b, longest) are tokens of an answer and no padding."""
        return torch.arange(self.chains) < self.lengths[:, None]
