"""Loading packages of graphs, each unpacked once, next to itself, for all processes.

Given a package, torch unpacks it anew for every process, into the temporary folder, where it stays
when the process is killed. Given a folder, torch loads the files in it.
"""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch

from specdec_core.base.files import alone, atomic_folder
from specdec_core.models import huge_pages


@cache
def load(package: Path) -> Any:
    """A graph, shared by all runners of this process. Only the package's loader, because its Python
    wrapper reads the description of its inputs at every call, which takes longer than a small
    draft's forward.

    Raises OSError, RuntimeError or BadZipFile for a package that cannot be unpacked or loaded.
    """
    graph = torch._C._aoti.AOTIModelPackageLoader(str(unpacked(package)), "model", False, 1, -1)
    if package.stat().st_size >= huge_pages.SIZE:
        huge_pages.settle()
    return graph


def unpacked(package: Path) -> Path:
    """The folder with the files of `package`, next to it: `row-token` of `row-token.pt2`. Unpacked
    where it is missing or differs from the package."""
    folder = package.with_suffix("")
    if not _same(folder, package):
        with alone(package):
            if not _same(folder, package):  # not made by another process meanwhile
                with ZipFile(package) as archive, atomic_folder(folder) as new:
                    archive.extractall(new)
    return folder


def _same(folder: Path, package: Path) -> bool:
    """Whether `folder` holds the files of `package`, by their checksums. A damaged library would
    end the process that loads it."""
    with ZipFile(package) as archive:
        files = {folder / entry.filename: entry.CRC for entry in archive.infolist()}
    return all(file.is_file() and _checksum(file) == crc for file, crc in files.items())


def _checksum(file: Path) -> int:
    """CRC-32, as in a zip archive."""
    checksum = 0
    with file.open("rb") as handle:
        while part := handle.read(1 << 20):
            checksum = zlib.crc32(part, checksum)
    return checksum
