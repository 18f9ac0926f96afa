"""The project's operators for CPUs: built once with the machine's compiler, then kept."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
from functools import cache
from pathlib import Path

import torch

from specdec_core.base.files import atomic_path, made_once
from specdec_core.base.workspace import kept_folder

log = logging.getLogger(__name__)

# Not -ffast-math: sums of products may be reordered, infinities stay infinities.
_FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-fPIC", "-shared", "-ffp-contract=fast"),
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
    "-fno-strict-aliasing",  # a buffer is filled as bits and read as numbers
)


@cache
def loaded(source: Path, what: str, without: str) -> bool:
    """Whether the operator in `source` is there; `what` it computes, and what is done `without` it,
    are for the log. Builds it where it is missing, in some twenty seconds; a machine without a
    compiler goes without it."""
    try:
        path = kept_folder("operators") / f"{source.stem}-{_digest(source)}.so"
        torch.ops.load_library(made_once(path, lambda: _build(source, path, what)))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        log.warning("%s: %s", without, reason.strip()[:200])
        return False
    return True


def _build(source: Path, path: Path, what: str) -> None:
    # They take a second to import.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils.cpp_extension import include_paths, library_paths

    log.warning("compiling %s: once, then kept", what)
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    with atomic_path(path) as library:
        command = [
            *(get_cpp_compiler(), *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", str(source)),
            *(f"-I{folder}" for folder in include_paths()),
            *(f"-L{folder}" for folder in library_paths()),
            *("-lc10", "-ltorch_cpu", "-ltorch", "-o", str(library)),
        ]
        subprocess.run(command, check=True, capture_output=True, text=True)


def _digest(source: Path) -> str:
    """Names everything that the library depends on."""
    processor = Path("/proc/cpuinfo")
    lines = processor.read_text().splitlines() if processor.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    sources = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    facts = [*sources, torch.__version__, os.environ.get("CXX", ""), flags, *_FLAGS]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]
