"""The weights in a draft's folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from specdec_core.base.errors import UserError
from specdec_core.models.fingerprints import weight_files
from specdec_core.models.reading import check_fit, reading

WEIGHTS = "model.safetensors"


def read_tensors(
    folder: Path, name: str, wanted: Callable[[str], bool] = lambda key: True
) -> dict[str, Tensor]:
    """The tensors of a folder with the `wanted` names, on the CPU; no other is read. Raises
    :class:`UserError` where there are no weights, or a file of them is damaged."""
    found: dict[str, Tensor] = {}
    for file in weight_files(name, folder):
        with reading(name, f"read {file.name}", file):
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as content:
                    found |= {key: content.get_tensor(key) for key in content.keys() if wanted(key)}  # noqa: SIM118 (it is no mapping)
            else:
                whole = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
                found |= {key: tensor for key, tensor in whole.items() if wanted(key)}
    return found


def check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], name: str
) -> None:
    """Raises :class:`UserError` for tensors of other names, shapes or kinds."""
    shapes = {
        key: (tuple(tensor.shape), expected[key])
        for key, tensor in tensors.items()
        if key in expected and tuple(tensor.shape) != expected[key]
    }
    check_fit(name, expected.keys() - tensors.keys(), tensors.keys() - expected.keys(), shapes)
    for key, tensor in tensors.items():
        if key not in ("d2t", "t2d") and not tensor.is_floating_point():
            raise UserError(f"{name}: {key} is quantised ({tensor.dtype}) in a way that is unknown")
