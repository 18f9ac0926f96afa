"""Memory that takes room only where something has been written.

A cache is as large as the longest texts that its slots may hold, and most texts are short. So on a
CPU it is mapped and left to the system, which gives memory page by page as it is first written to,
and takes back what is released.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


class Pages:
    """A `tensor` of zeros of this shape and data type, in such memory. Raises RuntimeError where
    there is none."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        count = math.prod(shape)
        size = count * dtype.itemsize
        try:
            self._map = mmap.mmap(-1, size)
        except OSError as error:  # as torch does when memory is short
            raise RuntimeError(f"{size / 2**20:.0f} MiB of memory: {error.strerror}") from None
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would hold many texts' unused ends
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor: Tensor = torch.frombuffer(self._map, dtype=dtype, count=count).view(*shape)

    def release(self, start: int, end: int) -> None:
        """Give back the whole pages among the bytes [start, end): what they held is lost."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end - end % mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
