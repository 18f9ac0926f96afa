"""Memory that takes room only where something has been written, and where two places may be one.

A cache is as large as the longest texts that its slots may hold, and most texts are short. So on a
CPU it is mapped and left to the system, which gives memory page by page as it is first written to,
and takes back what is released. What two places hold alike they can share: the processor's own page
table then leads both to the same memory, and whoever reads them needs to know nothing of it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_FIXED = 0x10  # Linux's MAP_FIXED
_KEEP_SIZE, _PUNCH_HOLE = 0x1, 0x2  # fallocate's


class Pages:
    """A `tensor` of zeros of this shape and data type, in such memory. Raises RuntimeError where
    there is none."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        count = math.prod(shape)
        size = count * dtype.itemsize
        self._file: int | None = None
        try:
            self._map = mmap.mmap(-1, size)
        except OSError as error:  # as torch does when memory is short
            raise RuntimeError(f"{size / 2**20:.0f} MiB of memory: {error.strerror}") from None
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("cache")
            weakref.finalize(self, os.close, self._file)
            os.ftruncate(self._file, size)
            self._map = mmap.mmap(self._file, size)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would hold many texts' unused ends
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor: Tensor = torch.frombuffer(self._map, dtype=dtype, count=count).view(*shape)

    @property
    def shares(self) -> bool:
        """Whether the system can lead several places to the same memory."""
        return self._file is not None

    @property
    def taken(self) -> int | None:
        """Bytes of memory that are in use; None where the system does not say."""
        return None if self._file is None else os.fstat(self._file).st_blocks * 512

    def lead(self, start: int, size: int, home: int) -> None:
        """Make the `size` bytes from `start` on those that were first at `home`; all three are of
        whole pages. Raises OSError where the system has no more entries for it."""
        assert self._file is not None
        libc, address = _libc(), self.tensor.data_ptr() + start
        access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED
        if libc.mmap(address, size, access, flags, self._file, home) != address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def release(self, start: int, end: int) -> None:
        """Give back the whole pages among those that were first at the bytes [start, end): what
        they held is lost."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end - end % mmap.PAGESIZE
        if last <= first:
            return
        if self._file is None:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
        elif _libc().fallocate(self._file, _KEEP_SIZE | _PUNCH_HOLE, first, last - first):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    number, size = ctypes.c_int, ctypes.c_size_t
    libc.mmap.restype = ctypes.c_size_t
    libc.mmap.argtypes = [ctypes.c_size_t, size, number, number, number, ctypes.c_long]
    libc.fallocate.argtypes = [number, number, ctypes.c_long, ctypes.c_long]
    return libc
