"""Files are written whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec_core.base.errors import UserError
from specdec_core.base.files import (
    NoRoom,
    alone,
    atomic_folder,
    atomic_path,
    locked,
    needs_room,
    remove_leftovers,
    write_atomically,
)
from tests.full_disk import SmallDisk


def test_an_interrupted_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = write_atomically(tmp_path / "deep" / "file.txt", "old")

    def interrupted() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_what_a_killed_process_leaves_is_not_taken_for_a_file_and_is_removed(
    tmp_path: Path,
) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from specdec_core.base.files import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])) as path:\n"
        "    path.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    whole = write_atomically(tmp_path / "trials" / "b.json", "whole")
    killed = subprocess.run([sys.executable, "-c", program, whole.with_name("a.json")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(whole.parent.iterdir())) == 2
    assert list(whole.parent.glob("*.json")) == [whole]
    remove_leftovers(tmp_path, "a.")
    assert list(whole.parent.iterdir()) == [whole]


def test_a_full_disk_is_one_line_and_leaves_the_old_file_and_no_litter(
    small_disk: SmallDisk,
) -> None:
    path = write_atomically(small_disk.folder / "file.txt", "old")
    small_disk.fill()
    with pytest.raises(UserError, match=f"^{path}: cannot be written, {small_disk.reason}; make"):
        write_atomically(path, "x" * 10_000)
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]
    small_disk.make_room()
    assert write_atomically(path, "x" * 10_000).stat().st_size == 10_000


def test_a_full_disk_is_found_behind_what_libraries_make_of_it(small_disk: SmallDisk) -> None:
    small_disk.fill()

    def wrapped() -> None:
        try:
            (small_disk.folder / "file").write_bytes(bytes(10_000))
        except OSError:
            raise RuntimeError("the run failed:\n\n  Traceback …") from None

    full = pytest.raises(NoRoom, match=f"^its state: cannot be written, {small_disk.reason}")
    with full, needs_room("its state"):
        wrapped()
    with pytest.raises(ZeroDivisionError), needs_room("nothing"):
        1 / 0  # noqa: B018


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        path = write_atomically(tmp_path / "file.txt", "text")
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_folder_takes_its_place_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder"
    with atomic_folder(path) as new:
        write_atomically(new / "file", "old")

    def interrupted() -> None:
        with atomic_folder(path) as new:
            write_atomically(new / "other", "half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [file.read_text() for file in path.iterdir()] == ["old"]
    with atomic_folder(path) as new:
        write_atomically(new / "file", "new")
    assert [file.read_text() for file in path.iterdir()] == ["new"]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, lambda path: os.symlink("elsewhere", path)])
def test_what_lies_where_a_lock_should_is_refused_and_not_waited_for(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    plant(tmp_path / ".lock")
    with pytest.raises(UserError, match="expected an ordinary file"), locked(tmp_path, "sweep"):
        pass
    plant(tmp_path / "trace.lock")
    with pytest.raises(UserError, match="expected an ordinary file"), alone(tmp_path / "trace"):
        pass
    assert not (tmp_path / "elsewhere").exists()
