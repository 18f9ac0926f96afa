"""The loss of a draft's states: cross-entropy with the target's distribution.

-Σ p_i log q_i over the draft vocabulary, p being the target's probabilities as they are: where the
target would rather write what the draft cannot propose, a position counts that much less.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


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


def cross_entropy(states: Tensor, weight: Tensor, target: Tensor, places: Tensor) -> Tensor:
    """Σ_r -Σ_i p_i log q_i with q = softmax(weight · states[r]) and p = target[places[r]].

    Args:
        states: normalised (rows, width).
        weight: the draft's output layer (draft vocabulary, width).
        target: probabilities (n, draft vocabulary).
        places: which of them each row is to predict (rows,).
    """
    loss: Tensor = _CrossEntropy.apply(states, weight, target, places)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    """The gradient is made with the loss, rows by rows: of the logits, q Σp - p alone is kept, in
    the target's data type."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, target: Tensor, places: Tensor) -> Tensor:
        count, narrow, matrix = len(states), _more(states.to(target.dtype)), weight.to(target.dtype)
        gradients = target.new_zeros(len(narrow), len(weight))
        loss = states.new_zeros((), dtype=torch.float32)
        for rows in parts(count, states.device):
            log_q = (narrow[rows] @ matrix.T)[: count - rows.start].float().log_softmax(-1)
            p = target[places[rows]].float()
            loss -= torch.dot(p.view(-1), log_q.view(-1))
            mass = p.sum(-1, keepdim=True)
            gradients[rows][: len(p)] = log_q.exp_().mul_(mass).sub_(p)
        ctx.save_for_backward(narrow, matrix, gradients)
        ctx.types, ctx.count = (states.dtype, weight.dtype), count
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        narrow, matrix, gradients = ctx.saved_tensors
        of_states, of_weight = ctx.types
        scale = grads[0]
        states = (gradients @ matrix)[: ctx.count].to(of_states) * scale
        weight = None
        if ctx.needs_input_grad[1]:  # a frozen output layer takes a third of the work less
            weight = (gradients.T @ narrow).to(of_weight) * scale
        return states, weight, None, None


def _more(rows: Tensor) -> Tensor:
    """`rows`, followed by rows of zeros up to a :func:`rounded` number."""
    return pad(rows, (0, 0, 0, rounded(len(rows)) - len(rows)))
