"""The operators that make probabilities of logits, and tokens of probabilities, on a CPU.

Torch takes a dozen passes over the vocabulary for it, each with a call: with a small model that is
as long as the forward.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specdec_core.base.operators import loaded
from specdec_core.config import Sampling

_SOURCE = Path(__file__).with_name("sample.cpp")
_LIBRARY = torch.library.Library("specdec", "FRAGMENT")
_LIBRARY.define(
    "warp(Tensor logits, float temperature, float min_p, int top_k, float top_p) -> Tensor"
)
_LIBRARY.define("quantiles(Tensor weights, Tensor uniforms) -> Tensor")


@cache
def available() -> bool:
    """Whether the operators could be loaded; they are built at the first use."""
    return loaded(_SOURCE, "sampling", "sampling goes without its operators")


def fits(numbers: Tensor) -> bool:
    """Whether the operators take these logits, or float32 weights, (…, vocabulary)."""
    return (
        numbers.device.type == "cpu"
        and numbers.dtype in (torch.float32, torch.bfloat16)
        and numbers.stride(-1) == 1
        and not numbers.requires_grad
        and available()
    )


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """See :func:`specdec_core.tokens.sampling.warp`."""
    rows = logits.reshape(-1, logits.shape[-1])
    top_k = min(sampling.top_k, rows.shape[1])  # any number in a request, 64 bits in C++
    probs: Tensor = torch.ops.specdec.warp(
        rows, sampling.temperature, sampling.min_p, top_k, sampling.top_p
    )
    return probs.view(logits.shape)


def quantiles(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The tokens (rows, n) at the uniform numbers (rows, n) of each row of `weights` (rows,
    vocabulary), in float32."""
    tokens: Tensor = torch.ops.specdec.quantiles(weights, uniforms)
    return tokens
