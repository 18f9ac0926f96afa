"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specdec_core.files import atomic_folder, atomic_path, write_atomically


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
