"""The losses of a draft's states, over the draft vocabulary.

- Cross-entropy with the target's distribution, -Σ p_i log q_i.
- -m log α with α = Σ min(p_i, q_i), the probability that rejection sampling accepts the draft's
  token (Samarin et al., LK losses, 2026). A small draft cannot have q = p, and need not cover what
  the target seldom writes.

p are the target's probabilities as they are, and m = Σ p_i: where the target would rather write
what the draft cannot propose, a position counts that much less.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

LossKind = Literal["cross_entropy", "acceptance"]

_LEAST = 1e-6  # of α, so that its logarithm is finite


def working_device() -> torch.device:
    """Where trainings on recorded answers run: a GPU where torch sees one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def working_type(device: torch.device) -> torch.dtype:
    """The data type of products that need not be exact: bfloat16 where the device multiplies it,
    which is about twice as fast as float32."""
    if device.type == "cuda":
        narrow = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        narrow = torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if narrow else torch.float32


def parts(count: int, device: torch.device) -> Iterator[slice]:
    """`count` rows of logits, some at a time: on a CPU so few that what is done to them stays in
    the processor's cache."""
    size = 64 if device.type == "cpu" else 8192
    return (slice(first, first + size) for first in range(0, count, size))


def rounded(count: int, step: int = 16) -> int:
    """`count`, or a little more: a CPU's products are compiled anew for every other number of rows,
    which takes longer than a small product does."""
    return -(-count // step) * step


def probabilities(last: Tensor, normaliser: Tensor, output: Tensor) -> Tensor:
    """The target's probabilities of the draft vocabulary (n, draft vocabulary), as `output`'s type.

    Args:
        last: what its output layer reads (n, width).
        normaliser: logsumexp of all its logits (n,).
        output: its output layer's rows of the draft vocabulary (draft vocabulary, width).
    """
    count = len(last)
    found = output.new_empty(count, len(output))
    last = _more(last.to(output.dtype))
    for rows in parts(count, last.device):
        logits = (last[rows] @ output.T)[: count - rows.start].float()
        found[rows] = logits.sub_(normaliser[rows, None]).exp_()
    return found


def draft_loss(
    kind: LossKind, states: Tensor, weight: Tensor, target: Tensor, places: Tensor
) -> Tensor:
    """The sum over r of the loss of q = softmax(weight · states[r]) with p = target[places[r]].

    Args:
        states: normalised (rows, width).
        weight: the draft's output layer (draft vocabulary, width).
        target: probabilities (n, draft vocabulary).
        places: which of them each row is to predict (rows,).
    """
    loss: Tensor = _DraftLoss.apply(kind, states, weight, target, places)  # type: ignore[no-untyped-call]
    return loss


def _cross_entropy(log_q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Its sum over rows, and its gradient of the logits: q Σp - p. Overwrites `log_q`."""
    loss = -torch.dot(p.view(-1), log_q.view(-1))
    return loss, log_q.exp_().mul_(p.sum(-1, keepdim=True)).sub_(p)


def _acceptance(log_q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """The same of -m log α; the gradient is m / α · q (Σ_{q < p} q - 1[q < p])."""
    q, m = log_q.exp_(), p.sum(-1, keepdim=True)
    alpha = torch.minimum(p, q).sum(-1, keepdim=True).clamp(min=_LEAST)
    wanting = (q < p).float()
    covered = (q * wanting).sum(-1, keepdim=True)
    return -(m * alpha.log()).sum(), q.mul_(covered - wanting).mul_(m / alpha)


_LOSSES = {"cross_entropy": _cross_entropy, "acceptance": _acceptance}


class _DraftLoss(torch.autograd.Function):
    """The gradient is made with the loss, rows by rows: that of the logits alone is kept, in the
    target's data type."""

    @staticmethod
    def forward(
        ctx: Any, kind: LossKind, states: Tensor, weight: Tensor, target: Tensor, places: Tensor
    ) -> Tensor:
        count, narrow, matrix = len(states), _more(states.to(target.dtype)), weight.to(target.dtype)
        gradients = target.new_zeros(len(narrow), len(weight))
        loss = states.new_zeros((), dtype=torch.float32)
        for rows in parts(count, states.device):
            log_q = (narrow[rows] @ matrix.T)[: count - rows.start].float().log_softmax(-1)
            part, gradient = _LOSSES[kind](log_q, target[places[rows]].float())
            loss += part
            gradients[rows][: len(gradient)] = gradient
        ctx.save_for_backward(narrow, matrix, gradients)
        ctx.types, ctx.count = (states.dtype, weight.dtype), count
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor | None, None, None]:
        narrow, matrix, gradients = ctx.saved_tensors
        of_states, of_weight = ctx.types
        scale = grads[0]
        states = (gradients @ matrix)[: ctx.count].to(of_states) * scale
        weight = None
        if ctx.needs_input_grad[2]:  # a frozen output layer takes a third of the work less
            weight = (gradients.T @ narrow).to(of_weight) * scale
        return None, states, weight, None, None


def _more(rows: Tensor) -> Tensor:
    """`rows`, followed by rows of zeros up to a :func:`rounded` number."""
    return pad(rows, (0, 0, 0, rounded(len(rows)) - len(rows)))
