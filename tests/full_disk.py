"""A disk that can be filled: a small one where this process may mount it, else a limit on files."""

import resource
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

SIZE = 64 << 20


class SmallDisk:
    """`folder` is where there may be no room; `reason` is how the system says so."""

    def __init__(self, folder: Path, mounted: bool) -> None:
        self.folder, self.mounted = folder, mounted
        self.reason = "no space left on device" if mounted else "file too large"
        self._limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self) -> None:
        """Leave no room for as much as a block."""
        if not self.mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, self._limit[1]))
            return
        with suppress(OSError), self._ballast.open("ab", buffering=0) as ballast:
            while ballast.write(bytes(1 << 20)):
                pass

    def make_room(self) -> None:
        if self.mounted:
            self._ballast.unlink(missing_ok=True)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limit)

    @property
    def _ballast(self) -> Path:
        return self.folder.parent / "ballast"


@pytest.fixture
def small_disk(tmp_path):
    root = tmp_path / "disk"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(root)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    (root / "home").mkdir()
    disk = SmallDisk(root / "home", mounted)
    try:
        yield disk
    finally:
        disk.make_room()
        if mounted:
            subprocess.run(["umount", "--lazy", str(root)], check=True)
