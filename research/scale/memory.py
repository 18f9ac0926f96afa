"""Memory of this machine and of this process, in MiB, followed while a measurement runs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

from specdec_core.base.memory import resident


def available() -> float:
    """Free memory of the machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1024


class MemoryWatch:
    """This process's memory `before` the block and at `most` in it, and the `least` free memory."""

    def __enter__(self) -> Self:
        self.before = self.most = resident()
        self.least = available()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self.most = max(self.most, resident())
            self.least = min(self.least, available())
