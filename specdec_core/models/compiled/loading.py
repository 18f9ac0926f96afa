"""Loading packages of graphs, each unpacked beside itself once for all processes.

Given a package, torch unpacks it anew for every process, into the temporary folder, where it stays
when the process is killed. Given a folder, it loads what is there.
"""

from __future__ import annotations

import fcntl
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch

from specdec_core.base.files import atomic_folder


@cache
def load(package: Path) -> Any:
    """A graph, shared by all runners of this process. Of the package only what runs it: itself it
    reads the description of its inputs at every call, longer than a small draft's forward takes.

    Raises OSError, RuntimeError or BadZipFile for a package that cannot be unpacked or loaded.
    """
    return torch._C._aoti.AOTIModelPackageLoader(str(unpacked(package)), "model", False, 1, -1)


def unpacked(package: Path) -> Path:
    """The folder with the files of `package`, beside it: `row-token` of `row-token.pt2`. Unpacked
    where it is missing or differs from the package."""
    folder = package.with_suffix("")
    if not _same(folder, package):
        with alone(package):
            if not _same(folder, package):  # nobody else has made it in the meantime
                with ZipFile(package) as archive, atomic_folder(folder) as new:
                    archive.extractall(new)
    return folder


@contextmanager
def alone(package: Path) -> Iterator[None]:
    """Let one process at a time make `package` or its folder; the others wait. What one that was
    killed left half made goes."""
    package.parent.mkdir(parents=True, exist_ok=True)
    with package.with_suffix(".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for left in package.parent.glob(f".{package.stem}.*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield


def _same(folder: Path, package: Path) -> bool:
    """Whether `folder` holds the files of `package`, by their checksums. A damaged library would
    end the process that loads it."""
    with ZipFile(package) as archive:
        files = {folder / entry.filename: entry.CRC for entry in archive.infolist()}
    return all(file.is_file() and _checksum(file) == crc for file, crc in files.items())


def _checksum(file: Path) -> int:
    """CRC-32, as in a zip archive."""
    found = 0
    with file.open("rb") as handle:
        while part := handle.read(1 << 20):
            found = zlib.crc32(part, found)
    return found
