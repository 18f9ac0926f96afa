"""The operator, and the layout that it reads matrices in."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specdec_core.base.operators import loaded

SOURCE = Path(__file__).with_name("multiply.cpp")
COLUMNS = 32  # of a panel

_LIBRARY = torch.library.Library("specdec", "FRAGMENT")
# Rows (…, dimensions) times a matrix, (…, columns), in bfloat16, summed in float32.
_LIBRARY.define("multiply(Tensor x, Tensor panels) -> Tensor")


@cache
def available() -> bool:
    """Whether the operator can be used; it is built at the first use. It is for processors that
    multiply bfloat16 in vectors (AVX-512) but not in tiles (AMX), which oneDNN uses better."""
    fits = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    return fits and loaded(
        SOURCE, "products of a few rows", "products of a few rows go without their operator"
    )


def fits(weight: Tensor) -> bool:
    """Whether the operator takes products with that matrix (columns, dimensions)."""
    return (
        weight.dtype == torch.bfloat16
        and weight.shape[0] % COLUMNS == 0
        and weight.shape[1] % 2 == 0
    )


def panels(weight: Tensor) -> Tensor:
    """A matrix (columns, dimensions), as the operator reads it: (columns / 32, dimensions / 2, 32,
    2)."""
    columns, dimensions = weight.shape
    shape = columns // COLUMNS, COLUMNS, dimensions // 2, 2
    return weight.view(shape).transpose(1, 2).contiguous()


def _like(x: Tensor, panels: Tensor) -> Tensor:
    """The shape of the output, for torch's compilers."""
    return x.new_empty((*x.shape[:-1], panels.shape[0] * COLUMNS))


torch.library.register_fake("specdec::multiply", _like, lib=_LIBRARY)
