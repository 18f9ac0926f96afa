"""Memory of a process, in MiB."""

from __future__ import annotations

import os
from pathlib import Path


def resident(process: int | str = "self") -> float:
    """Memory of this process, or of another one by its id."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
