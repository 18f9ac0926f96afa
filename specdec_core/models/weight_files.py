"""The files of a draft's folder: `config.json`, and weights as transformers names them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from specdec_core.base.errors import UserError
from specdec_core.models.fingerprints import weight_files

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_FAULTS = (OSError, SafetensorError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError)


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


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """All tensors of a folder, on the CPU.

    Raises:
        UserError: there are no weights, or a file of them is damaged.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(name, folder):
        try:
            if file.suffix == ".safetensors":
                tensors.update(load_file(file))
            else:
                tensors.update(torch.load(file, map_location="cpu", weights_only=True))
        except _FAULTS as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
            raise UserError(f"{name}: {file.name} cannot be read: {reason.strip()}") from None
    return tensors


def check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], name: str
) -> None:
    """Raises :class:`UserError` for tensors of other names, shapes or kinds."""
    for what, keys in (
        ("unknown tensors", tensors.keys() - expected.keys()),
        ("missing tensors", expected.keys() - tensors.keys()),
    ):
        if keys:
            some = ", ".join(sorted(keys)[:3]) + (", …" if len(keys) > 3 else "")
            raise UserError(f"{name}: {what}: {some}")
    for key, tensor in tensors.items():
        if tuple(tensor.shape) != expected[key]:
            raise UserError(
                f"{name}: {key} has the shape {tuple(tensor.shape)}, not {expected[key]}"
            )
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
