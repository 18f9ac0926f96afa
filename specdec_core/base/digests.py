"""Digests of files that may be large."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

WHOLE = 256 * 2**20  # bytes of files up to which all of them are read
BLOCKS, BLOCK = 64, 4096  # of each file where they are larger
GGUF_HEAD = 64 * 2**20  # bytes that hold a GGUF's metadata; vocabularies take some ten million


def files_digest(files: Sequence[Path], begin: bytes = b"") -> str:
    """16 hex digits of SHA-256 over `begin` and the sizes and contents of `files`. Of files that
    are larger than 256 MiB together, the contents are a file's head, which is all but its weights
    (safetensors, GGUF), and 64 blocks of 4 KiB spread evenly over each. Raises OSError for one that
    cannot be read."""
    digest = hashlib.sha256(begin)
    sizes = [file.stat().st_size for file in files]
    for file, size in zip(files, sizes, strict=True):
        digest.update(f"\n{file.name} {size}\n".encode())
        for part in _parts(file, size, sum(sizes) <= WHOLE):
            digest.update(part)
    return digest.hexdigest()[:16]


def _parts(file: Path, size: int, whole: bool) -> Iterator[bytes]:
    with file.open("rb") as content:
        if whole:
            while part := content.read(2**20):
                yield part
            return
        if file.suffix == ".safetensors":
            length = int.from_bytes(content.read(8), "little")
            yield content.read(min(length, size))
        elif file.suffix == ".gguf":
            yield content.read(GGUF_HEAD)
        for block in range(BLOCKS):
            content.seek(block * max(size - BLOCK, 0) // (BLOCKS - 1))
            yield content.read(BLOCK)
