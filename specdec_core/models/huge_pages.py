"""Weights in huge pages.

A forward of a few tokens reads every weight once. In pages of 4 KiB the processor looks up the
address of each page, in a virtual machine twice over, and a model larger than the processor's
caches is then read at two thirds of the speed. Most systems give huge pages only on request, and
torch, which allocates the weights of compiled graphs, does not request them."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)

SIZE = 2 << 20  # of a huge page, on x86-64 and on ARM with small pages of 4 KiB
_COLLAPSE = 25  # Linux's MADV_COLLAPSE, since 6.1
_PRESENT = np.uint64(1 << 63)


def settle() -> int:
    """Move this process's memory into huge pages, wherever all small pages of a huge page are in
    use, so that it takes no more memory than before. Returns the bytes in huge pages, 0 where the
    system does not support it."""
    if SIZE % mmap.PAGESIZE:
        return 0
    try:
        stretches = list(_full())
    except OSError as error:  # no Linux, or no access to the page map
        log.debug("weights stay in small pages: %s", error)
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    settled = 0
    for start, end in stretches:
        if madvise(start, end - start, _COLLAPSE) == 0:
            settled += end - start
        else:  # an old system, an unsuitable mapping, or no free page
            reason = os.strerror(ctypes.get_errno())
            log.debug("%d MiB stay in small pages: %s", (end - start) >> 20, reason)
    return settled


def _full() -> Iterator[tuple[int, int]]:
    """Ranges of private memory, of whole huge pages, in which every page is in use."""
    pages = SIZE // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for first, last in _private():
            first, last = -(-first // SIZE) * SIZE, last // SIZE * SIZE
            if last <= first:
                continue
            entries = os.pread(
                pagemap.fileno(), (last - first) // mmap.PAGESIZE * 8, first // mmap.PAGESIZE * 8
            )
            present = np.frombuffer(entries, np.uint64) & _PRESENT != 0
            full = present.reshape(-1, pages).all(axis=1)
            edges = np.flatnonzero(np.diff(full, prepend=False, append=False))
            for begin, until in edges.reshape(-1, 2).tolist():
                yield first + begin * SIZE, first + until * SIZE


def _private() -> list[tuple[int, int]]:
    """Ranges of this process's private memory without a file."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode, *_ = line.split(maxsplit=5)
        if access == "rw-p" and inode == "0":
            start, end = (int(edge, 16) for edge in span.split("-"))
            found.append((start, end))
    return found
