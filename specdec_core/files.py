"""Files are written whole or not at all."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec_core.errors import UserError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, renamed onto it when the block succeeds."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # mkstemp's are for their owner alone
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> Path:
    """Write `text` to `path` as one step; returns `path`."""
    with atomic_path(path) as temporary:
        temporary.write_text(text)
    return Path(path)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`, which takes its place when the block succeeds. What was
    at `path` is gone then, and untouched otherwise."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=path.parent, prefix=f".{path.name}.", ignore_cleanup_errors=True
    ) as own:
        new, old = Path(own) / "new", Path(own) / "old"
        new.mkdir()
        yield new
        if path.exists():
            path.replace(old)
        new.replace(path)


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Make `folder` and keep a second process out of it; the lock goes with the process, however
    it ends. Raises :class:`UserError` where another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: this {what} is running in another process") from None
        yield


def in_use(folder: Path) -> bool:
    """Whether a process of this machine keeps others out of `folder` (:func:`locked`)."""
    if not (folder / ".lock").exists():
        return False
    try:
        with locked(folder, ""):
            return False
    except UserError:
        return True


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
