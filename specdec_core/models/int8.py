"""Matrices in eight bits, half the bytes of bfloat16: a form to ship heads in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec_core.base.errors import UserError

# Not `weight`, which vLLM would take for one.
_NUMBERS, _SCALE = "_int8", "_scale"
_MOST = 127


def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with each matrix `w` (rows, columns) as `w_int8`, of the same shape, and `w_scale`
    (rows, 1) in bfloat16: w ≈ w_int8 · w_scale, within half a scale. Tensors of other shapes
    stay unchanged."""
    small: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not tensor.is_floating_point():
            small[name] = tensor
            continue
        wide = tensor.float()
        scale = (wide.abs().amax(1, keepdim=True) / _MOST).bfloat16()
        # A row of zeros has no scale. A stored scale may be too small by 1/512, which changes the
        # largest number of a row by a quarter of the scale.
        numbers = wide / scale.float().clamp(min=torch.finfo(torch.float32).tiny)
        small[name + _NUMBERS] = numbers.round().clamp(-_MOST, _MOST).to(torch.int8)
        small[name + _SCALE] = scale
    return small


def unpacked(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors that :func:`packed` had, its matrices in float32. Raises :class:`UserError` where
    a scale is missing or has another shape."""
    whole: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if key.endswith(_SCALE):
            continue
        if not key.endswith(_NUMBERS):
            whole[key] = tensor
            continue
        matrix = key.removesuffix(_NUMBERS)
        scale = tensors.get(matrix + _SCALE)
        if scale is None or scale.shape != (len(tensor), 1):
            raise UserError(f"{name}: {matrix}: no scale for each of its {len(tensor)} rows")
        whole[matrix] = tensor.float() * scale.float()
    return whole


def is_scale(name: str) -> bool:
    """Whether :func:`packed` made that tensor."""
    return name.endswith(_SCALE)
