"""The files of a draft's folder: `config.json`, and weights as transformers names them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec_core.base.errors import UserError
from specdec_core.models.fingerprints import weight_files
from specdec_core.models.reading import check_fit, reading

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """A folder's `config.json`. Raises :class:`UserError` where there is none."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{name}: {CONFIG}: {reason}") from None
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise UserError(f"{name}: {CONFIG} is not a JSON object")
    return config


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


def holds(folder: Path, tensor: str) -> bool:
    """Whether a folder's weights have a tensor of that name; none of them is read."""
    try:
        return any(_holds(file, tensor) for file in weight_files(str(folder), folder))
    except (UserError, OSError, SafetensorError, BadZipFile):
        return False


def _holds(file: Path, tensor: str) -> bool:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="numpy") as content:
            return tensor in content.keys()  # noqa: SIM118 (it is no mapping)
    with ZipFile(file) as content:  # as torch.save writes it: a pickle with the names, and the data
        pickles = [member for member in content.namelist() if member.endswith("data.pkl")]
        return any(tensor.encode() in content.read(member) for member in pickles)
