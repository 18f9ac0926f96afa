"""Models in GGUF files, llama.cpp's format: unpacked once into a folder of transformers' own.

The folder has the weights in the data type that they are computed in, and any library can load it.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

from specdec_core.base.digests import files_digest
from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_folder, made_once
from specdec_core.base.workspace import kept_folder
from specdec_core.models.reading import read_model, reading

log = logging.getLogger(__name__)

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAGIC = b"GGUF"
_FAULTS = (OSError, ValueError, KeyError, IndexError, TypeError, RuntimeError, AttributeError)


@cache
def unpacked(file: Path, name: str) -> Path:
    """The folder with the model, its tokenizer and its chat template that `file` holds; errors name
    `name`. Quantised weights become bfloat16, weights of other types keep their type. A missing
    folder is made, by one process at a time, and kept by the file's contents. Raises
    :class:`UserError` where the file is missing, damaged or of a kind that transformers does not
    read."""
    if not file.is_file():
        raise UserError(f"{name}: no such file")
    folder = kept_folder("models") / f"{file.stem}-{files_digest([file])}"
    return made_once(folder, partial(_unpack, file, name, folder))


def _unpack(file: Path, name: str, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    log.warning("unpacking %s: once, then kept in %s", name, folder)
    with reading(name, "read it as a GGUF file", file):
        dtype = _dtype(file, name)
        where: dict[str, Any] = {"gguf_file": file.name}
        whole = GgufConfig(dequantize=True)
        read = read_model(
            AutoModelForCausalLM, file.parent, name, dtype=dtype, quantization_config=whole, **where
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    with atomic_folder(folder) as new:
        read.save_pretrained(new)
        tokenizer.save_pretrained(new)


def _dtype(file: Path, name: str) -> str:
    """The data type of most weights, or bfloat16 where these are quantised."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(f"{name}: to read GGUF files, install gguf (pip install gguf)") from None

    try:
        tensors = GGUFReader(file).tensors
    except _FAULTS:
        with file.open("rb") as content:
            if content.read(len(_MAGIC)) != _MAGIC:
                raise UserError(f"{name}: not a GGUF file") from None
        size = file.stat().st_size
        raise UserError(
            f"{name}: a GGUF file that is damaged or cut off ({size:,} bytes); fetch it again"
        ) from None
    kinds: Counter[str] = Counter()
    for tensor in tensors:
        kinds[tensor.tensor_type.name] += int(tensor.n_elements)
    return _FLOATS.get(kinds.most_common(1)[0][0], "bfloat16")
