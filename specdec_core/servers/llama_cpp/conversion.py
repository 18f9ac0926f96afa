"""Models as GGUF files, converted once by llama.cpp's script, then kept by their contents."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_path, made_once
from specdec_core.base.names import digest_name
from specdec_core.base.workspace import kept_folder
from specdec_core.models.fingerprints import fingerprint, model_folder
from specdec_core.models.location import gguf_file

_SCRIPT = Path(__file__).with_name("convert.py")
# llama.cpp's names of the data types.
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def gguf_of(model: str, dtype: str, script: Path, target: str | None = None) -> Path:
    """The GGUF file of a model. A name of such a file is this file, whatever its data type; any
    other model is converted to `dtype` by llama.cpp's `script`. An EAGLE-3 head needs its
    `target`.

    Raises:
        UserError: the model is missing, or the script is missing or does not read it.
    """
    if (given := gguf_file(model)) is not None:
        if not given.is_file():
            raise UserError(f"{model}: no such file")
        return given.resolve()
    folder = model_folder(model)
    read = [folder] if target is None else [folder, model_folder(target)]
    key = digest_name(" ".join(map(fingerprint, map(str, read))))
    kept = kept_folder("gguf") / f"{folder.name}-{key}-{dtype}.gguf"
    return made_once(kept, lambda: _convert(model, read, TYPES[dtype], script, kept))


def _convert(model: str, read: list[Path], outtype: str, script: Path, file: Path) -> None:
    words = [str(script), str(read[0]), "--outtype", outtype]
    words += [word for target in read[1:] for word in ("--target-model-dir", str(target))]
    by_hand = shlex.join(["python", *words, "--outfile", f"{file.stem}.gguf"])
    if not script.is_file():
        raise UserError(
            f"{model}: llama.cpp reads GGUF files, and its script that converts others is not in"
            f" {script.parent} (`make llama-cpp` puts it there); by hand: {by_hand}"
        )
    with atomic_path(file) as new:
        done = subprocess.run(
            [sys.executable, "-P", str(_SCRIPT), *words, "--outfile", str(new)],
            env={**os.environ, "PYTHONPATH": ""},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            last = said[-1] if said else f"exit status {done.returncode}"
            raise UserError(f"{model}: llama.cpp cannot convert it: {last}; by hand: {by_hand}")
