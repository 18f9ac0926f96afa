"""Files are written whole or not at all, and a full disk is a one-line error."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from specdec_core.base.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SQLITE_FULL = "database or disk is full"  # SQLite's errors come without a number


class NoRoom(UserError, OSError):
    """There is no room for a file. Files written before are complete."""


@contextmanager
def needs_room(what: object, others: bool = False) -> Iterator[None]:
    """Raises :class:`NoRoom` where the block runs out of room for `what`, or with `others` for
    another of its files, even if libraries have wrapped the error. Other errors pass."""
    try:
        yield
    except NoRoom:
        raise
    except Exception as error:
        full = no_room(error, what, others)
        if full is None:
            raise
        raise full from error


def no_room(error: BaseException, what: object, others: bool = False) -> NoRoom | None:
    """The error for a disk that was too full for `what`, if `error` comes from one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NoRoom):
            return cause
        number = cause.errno if isinstance(cause, OSError) else None
        if number in _FULL or _SQLITE_FULL in str(cause):
            reason = os.strerror(number or errno.ENOSPC).lower()
            file = cause.filename if others and isinstance(cause, OSError) else None
            return NoRoom(
                f"{file or what}: cannot be written, {reason}; make room and give the same command,"
                " which goes on from what is finished"
            )
        cause = cause.__cause__ or cause.__context__
    return None


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path for the file in a hidden folder next to `path`, renamed to it when the block
    succeeds: what a killed process leaves is found by no pattern that finds `path`, and by
    :func:`remove_leftovers`. Raises :class:`NoRoom` where the disk is full."""
    path = Path(path)
    with needs_room(path), _hidden_folder(path) as hidden:
        yield hidden / path.name
        (hidden / path.name).replace(path)


def write_atomically(path: Path, text: str) -> Path:
    """Write `text` to `path` as one step; returns `path`."""
    with atomic_path(path) as temporary:
        temporary.write_text(text)
    return Path(path)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder next to `path`, which replaces it when the block succeeds; otherwise
    `path` stays as it is. Raises :class:`NoRoom` where the disk is full."""
    path = Path(path)
    with needs_room(path), _hidden_folder(path) as hidden:
        new, old = hidden / "new", hidden / "old"
        new.mkdir()
        yield new
        if path.exists():
            path.replace(old)
        new.replace(path)


@contextmanager
def _hidden_folder(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=path.parent, prefix=f".{path.name}.", ignore_cleanup_errors=True
    ) as hidden:
        yield Path(hidden)


def remove_leftovers(folder: Path, name: str, below: bool = True) -> None:
    """Remove what killed processes left in `folder`, and in all folders `below` it, of files and
    folders whose names begin with `name`."""
    pattern = f".{glob.escape(name)}*"
    for left in list(folder.rglob(pattern) if below else folder.glob(pattern)):
        shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def _lock_file(path: Path) -> IO[bytes]:
    """`path`, made where it is missing, opened for a lock. Raises :class:`UserError` where it is
    something else: a link leads elsewhere, and opening a pipe waits for ever."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.fdopen(os.open(path, flags, 0o666), "rb", 0)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    else:
        if stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
            return handle
        handle.close()
    raise UserError(f"{path}: expected an ordinary file for a lock; remove what is there")


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Create `folder` and lock it for this process; the lock ends with the process. Raises
    :class:`UserError` where another process has it."""
    with needs_room(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _lock_file(folder / ".lock") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: this {what} is running in another process") from None
        yield


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process at a time make `path` or a folder beside it; the others wait. What a killed
    process left of them is deleted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock_file(path.with_suffix(".lock")) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        remove_leftovers(path.parent, f"{path.stem}.", below=False)
        yield


def in_use(folder: Path) -> bool:
    """Whether a process of this machine has locked `folder` (:func:`locked`)."""
    if not (folder / ".lock").exists():
        return False
    try:
        with locked(folder, ""):
            return False
    except UserError:
        return True
