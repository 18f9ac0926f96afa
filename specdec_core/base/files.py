"""Files are written whole or not at all; where none can be written, the error is one line."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from specdec_core.base.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SQLITE_FULL = "database or disk is full"  # SQLite's errors come without a number
_WHOLE = "whole"  # a folder that only has to be renamed to its place
_HERE = -100  # AT_FDCWD
_TEMPORARY = "." + 8 * "[a-z0-9_]"  # what the name of a hidden folder ends with


class NoRoom(UserError, OSError):
    """There is no room for a file. Files written before are complete."""


class Unwritable(UserError, OSError):
    """A file or folder cannot be at its place."""


@contextmanager
def _placing(path: Path) -> Iterator[None]:
    """Raise :class:`Unwritable` where the system refuses a file or folder at `path`."""
    try:
        yield
    except OSError as error:
        # A folder cannot be made where a file exists.
        number = errno.ENOTDIR if error.errno == errno.EEXIST else error.errno
        reason = os.strerror(number).lower() if number else error
        raise Unwritable(f"{path}: cannot be written, {reason}") from error


@contextmanager
def needs_room(what: object, any_file: bool = False) -> Iterator[None]:
    """Raise :class:`NoRoom` where the disk is too full for `what`, even if a library has wrapped
    the error. With `any_file` the error names the file that has no room, whichever it is."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, NoRoom):
            number = cause.errno if isinstance(cause, OSError) else None
            if number in _FULL or _SQLITE_FULL in str(cause):
                reason = os.strerror(number or errno.ENOSPC).lower()
                file = cause.filename if any_file and isinstance(cause, OSError) else None
                raise NoRoom(
                    f"{file or what}: cannot be written, {reason}; make room and give the same"
                    " command, which goes on from what is finished"
                ) from error
            cause = cause.__cause__ or cause.__context__
        if cause is None or cause is error:
            raise
        raise cause from error


@contextmanager
def atomic_path(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Yield a path for the file in a hidden folder next to `path`, renamed to it when the block
    succeeds: what a killed process leaves is found by no pattern that finds `path`, and by
    :func:`remove_leftovers`. After a power cut `path` is the old file or the new one. Raises
    :class:`NoRoom` where the disk is full, and :class:`Unwritable` where no file can be.

    The file gets the permissions `mode`. Without `mode` it keeps the permissions of the file that
    it replaces, or gets what the umask allows, even if a library wrote it for one user only."""
    path = Path(path)
    with needs_room(path), _hidden_folder(path) as hidden:
        new = hidden / path.name
        if mode is not None:
            new.touch(mode=mode)
        yield new
        if mode is None:
            _set_mode(new, path, _allowed(hidden))
        _to_disk(new)
        with _placing(path):
            new.replace(path)


def write_atomically(path: Path, text: str) -> Path:
    """Write `text` to `path` as one step; returns `path`."""
    with atomic_path(path) as temporary:
        temporary.write_text(text)
    return Path(path)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder next to `path`, which replaces it when the block succeeds; otherwise,
    and after a power cut, `path` is unchanged. The folder and each file in it get permissions as in
    :func:`atomic_path`. Raises :class:`NoRoom` where the disk is full, and :class:`Unwritable`
    where no folder can be."""
    path = Path(path)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        _recover(left)
    with needs_room(path), _hidden_folder(path) as hidden:
        new, allowed = hidden / "new", _allowed(hidden)
        new.mkdir()
        yield new
        for part in (*new.rglob("*"), new):
            if not part.is_symlink():
                _set_mode(part, path / part.relative_to(new), allowed)
                _to_disk(part)
        with _placing(path):
            _put_in_place(new, path)
        _to_disk(path.parent)  # before the old one is deleted


def _put_in_place(new: Path, path: Path) -> None:
    """Rename the folder `new` to `path`; what is there becomes another folder beside `new`."""
    if not path.exists():
        new.rename(path)
    elif not _exchanged(new, path):
        # For a moment `path` does not exist. The name tells :func:`_recover` of a whole folder.
        whole = new.rename(new.with_name(_WHOLE))
        _to_disk(whole.parent)
        try:
            path.rename(new.with_name("old"))
        finally:  # Ctrl-C between the two deletes neither
            _recover(whole.parent)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system or the filesystem, as NFS, does not
    do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if not rename(_HERE, os.fsencode(one.absolute()), _HERE, os.fsencode(other.absolute()), 2):
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _recover(hidden: Path) -> None:
    """Move a whole new folder in `hidden` to its place, if the place is empty."""
    path, whole = hidden.with_name(hidden.name[1:].rpartition(".")[0]), hidden / _WHOLE
    if whole.exists() and not path.exists():
        whole.rename(path)


def _allowed(hidden: Path) -> int:
    """The permissions that the umask leaves to a new folder. A process can only ask for its umask
    by setting it, for all threads."""
    probe = hidden / "probe"
    probe.mkdir()
    allowed = probe.stat().st_mode & 0o777
    probe.rmdir()
    return allowed


def _set_mode(new: Path, replaced: Path, allowed: int) -> None:
    """Give a file or folder the permissions of the one that it replaces, or else the `allowed`
    ones. A file stays executable."""
    try:
        mode = stat.S_IMODE(replaced.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        own = stat.S_IMODE(new.stat().st_mode)
        mode = allowed if new.is_dir() else (allowed & 0o666) | (own & 0o111)
    new.chmod(mode)


def _to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk: a rename may get there
    earlier."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _hidden_folder(path: Path) -> Iterator[Path]:
    with ExitStack() as held:
        with _placing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            hidden = held.enter_context(
                tempfile.TemporaryDirectory(
                    dir=path.parent, prefix=f".{path.name}.", ignore_cleanup_errors=True
                )
            )
        yield Path(hidden)


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove what killed processes left in `folder`, and in all folders below it, under names that
    begin with `name`. A whole new folder that was to replace an old one is put in place."""
    _remove(folder.rglob(f".{glob.escape(name)}*{_TEMPORARY}"))


def _remove(leftovers: Iterable[Path]) -> None:
    for left in list(leftovers):
        if left.is_dir():  # a file is a user's
            _recover(left)
            shutil.rmtree(left)


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
    :class:`UserError` where another process has it, or no folder can be."""
    with needs_room(folder), _placing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock_file(folder / ".lock")
    with lock as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: this {what} is running in another process") from None
        yield


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process at a time make `path`. What a killed process left of it is deleted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock_file(path.with_name(f"{path.name}.lock")) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        _remove(path.parent.glob(f".{glob.escape(path.name)}{_TEMPORARY}"))
        yield


def made_once(path: Path, make: Callable[[], object]) -> Path:
    """`path`. Where it is missing, one process calls `make` for it, and the others wait."""
    if not path.exists():
        with alone(path):
            if not path.exists():  # not made by another process meanwhile
                make()
    return path
