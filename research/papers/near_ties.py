"""How far apart two tokens were where a greedy output differs from autoregressive decoding's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

from specdec_core.config import Document
from specdec_core.models.runner import Batch, ModelRunner

TOGETHER = 8  # tokens of the forward that verifies


class FirstDifference(Document):
    """The first token at which an output differs: the `gap` of both tokens' logits, and the
    `rounding` by which logits of that forward change with its width."""

    config_id: str
    prompts: str
    prompt: int
    position: int
    gap: float
    rounding: float

    @property
    def fault(self) -> bool:
        """Whether rounding, which may raise one logit and lower the other, does not explain it."""
        return self.gap > 2 * self.rounding


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two outputs have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@torch.inference_mode()
def logit_gap(
    runner: ModelRunner, tokens: Sequence[int], one: int, other: int
) -> tuple[float, float]:
    """The difference of two tokens' logits after `tokens`, and the rounding of that forward: the
    largest change of a logit between a forward of the last token alone and one of the last
    :data:`TOGETHER`, and at least one step of the data type at the largest logit."""
    logits = []
    for width in (1, min(TOGETHER, len(tokens))):
        runner.truncate(0, 0)
        if earlier := tokens[:-width]:
            runner.prefill([0], [earlier])
        output = runner.forward(Batch([0], [tokens[-width:]], wanted=[1]))
        logits.append(output.logits[-1])
    runner.truncate(0, 0)
    alone, together = logits
    step = float(torch.finfo(alone.dtype).eps * alone.abs().max())
    rounding = max(float((alone.float() - together.float()).abs().max()), step)
    return abs(float(alone[one] - alone[other])), rounding
