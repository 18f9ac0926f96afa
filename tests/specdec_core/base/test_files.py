"""Files are written whole or not at all."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specdec_core.base import files
from specdec_core.base.errors import UserError
from specdec_core.base.files import (
    NoRoom,
    alone,
    atomic_folder,
    atomic_path,
    locked,
    made_once,
    needs_room,
    remove_leftovers,
    write_atomically,
)


def test_what_several_ask_for_is_made_once(tmp_path):
    path, made = tmp_path / "cache" / "file", []

    def make():
        made.append(path)
        time.sleep(0.1)
        path.touch()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: made_once(path, make), range(3))) == [path] * 3
    assert made == [path]


def test_an_interrupted_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = write_atomically(tmp_path / "deep" / "file.txt", "old")

    def interrupted():
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_what_a_killed_process_leaves_is_not_taken_for_a_file_and_is_removed(tmp_path):
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


def test_what_a_user_keeps_beside_a_file_is_no_leftover(tmp_path):
    """As `.env.local` beside a file of keys called env, or what an editor keeps."""
    own = [tmp_path / name for name in (".env.local", ".env.settings", ".env.swp")]
    for file in own:
        file.touch()
    (tmp_path / ".env.d").mkdir()
    other = tmp_path / ".env.2.json.abcdefgh"  # another process is at work on it
    other.mkdir()
    left = tmp_path / ".env.1.json.abcdefgh"
    left.mkdir()
    with alone(tmp_path / "env"):
        pass
    with alone(tmp_path / "env.1.json"):
        pass
    assert not left.exists()
    assert all(file.exists() for file in (*own, other, tmp_path / ".env.d"))


def test_a_full_disk_is_one_line_and_leaves_the_old_file_and_no_litter(small_disk):
    path = write_atomically(small_disk.folder / "file.txt", "old")
    small_disk.fill()
    with pytest.raises(UserError, match=f"^{path}: cannot be written, {small_disk.reason}; make"):
        write_atomically(path, "x" * 10_000)
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]
    small_disk.make_room()
    assert write_atomically(path, "x" * 10_000).stat().st_size == 10_000


@pytest.mark.parametrize(
    ("name", "reason"), [("folder", "is a directory"), ("file/inner", "not a directory")]
)
def test_a_place_where_no_file_can_be_is_one_line(tmp_path, name, reason):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before, path = sorted(tmp_path.iterdir()), tmp_path / name
    with pytest.raises(UserError, match=f"^{path}: cannot be written, {reason}$"):
        write_atomically(path, "text")
    assert sorted(tmp_path.iterdir()) == before


def test_a_place_where_no_folder_can_be_is_one_line(tmp_path):
    file = write_atomically(tmp_path / "file", "text")
    said = "cannot be written, not a directory$"
    for folder in (file, file / "inner"):
        with pytest.raises(UserError, match=f"^{folder}: {said}"), locked(folder, "sweep"):
            pass
    with pytest.raises(UserError, match=f"^{folder}: {said}"), atomic_folder(folder):
        pass
    assert file.read_text() == "text"


def test_a_full_disk_is_found_behind_what_libraries_make_of_it(small_disk):
    small_disk.fill()

    def wrapped():
        try:
            (small_disk.folder / "file").write_bytes(bytes(10_000))
        except OSError:
            raise RuntimeError("the run failed:\n\n  Traceback …") from None

    full = pytest.raises(NoRoom, match=f"^its state: cannot be written, {small_disk.reason}")
    with full, needs_room("its state"):
        wrapped()
    with pytest.raises(ZeroDivisionError), needs_room("nothing"):
        1 / 0  # noqa: B018


@pytest.fixture
def umask():
    """Files may be read by other users, and written by their own alone."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path):
    return path.stat().st_mode & 0o7777


def test_new_files_have_the_permissions_that_the_umask_leaves(umask, tmp_path):
    assert mode(write_atomically(tmp_path / "file.txt", "text")) == 0o644
    with atomic_path(tmp_path / "weights") as path:
        path.touch(mode=0o600)  # as libraries do
    assert mode(tmp_path / "weights") == 0o644
    with atomic_folder(tmp_path / "folder") as folder:
        (folder / "inner").mkdir(mode=0o700)
        (folder / "inner" / "weights").touch(mode=0o600)
        (folder / "library").touch(mode=0o700)
    folder = tmp_path / "folder"
    modes = [mode(folder / name) for name in (".", "inner", "inner/weights", "library")]
    assert modes == [0o755, 0o755, 0o644, 0o744]
    with atomic_path(tmp_path / "secret", mode=0o600) as path:
        assert mode(path) == 0o600
        path.write_text("key")
    assert mode(tmp_path / "secret") == 0o600


def test_replaced_files_keep_their_permissions(umask, tmp_path):
    file = write_atomically(tmp_path / "file.txt", "old")
    file.chmod(0o640)
    assert mode(write_atomically(file, "new")) == 0o640
    folder = tmp_path / "folder"
    with atomic_folder(folder) as new:
        (new / "private").touch()
    folder.chmod(0o2770)
    (folder / "private").chmod(0o600)
    with atomic_folder(folder) as new:
        (new / "private").touch()
        (new / "other").touch()
    modes = [mode(folder / name) for name in (".", "private", "other")]
    assert modes == [0o2770, 0o600, 0o644]


def test_what_is_renamed_is_on_the_disk_before(tmp_path, monkeypatch):
    """Else a power cut may leave the new name with nothing in it."""
    synced: dict[int, bool] = {}  # by inode, whether it was in place
    fsync, places = os.fsync, (tmp_path / "file", tmp_path / "folder")

    def spy(handle):
        inode = os.fstat(handle).st_ino
        there = (path for place in places for path in (place, *place.rglob("*")) if path.exists())
        synced[inode] = any(path.stat().st_ino == inode for path in there)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", spy)
    file, folder = places
    for _ in range(2):
        write_atomically(file, "text")
        with atomic_folder(folder) as new:
            (new / "inner").mkdir()
            (new / "inner" / "file").write_text("text")
        for path in (file, folder, folder / "inner", folder / "inner" / "file"):
            assert synced[path.stat().st_ino] is False


def test_a_folder_takes_its_place_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "folder"
    with atomic_folder(path) as new:
        write_atomically(new / "file", "old")

    def interrupted():
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
def test_what_lies_where_a_lock_should_is_refused_and_not_waited_for(tmp_path, plant):
    plant(tmp_path / ".lock")
    with pytest.raises(UserError, match="expected an ordinary file"), locked(tmp_path, "sweep"):
        pass
    plant(tmp_path / "trace.lock")
    with pytest.raises(UserError, match="expected an ordinary file"), alone(tmp_path / "trace"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_there_is_always_one_of_two_folders(tmp_path):
    path = tmp_path / "folder"

    def replace():
        with atomic_folder(path) as new:
            (new / "file").touch()

    replace()
    look = "import os, sys\nprint(flush=True)\nwhile os.path.exists(sys.argv[1]): pass"
    command = [sys.executable, "-c", look, path / "file"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
        reader.stdout.readline()
        for _ in range(200):
            replace()
        still_there = reader.poll() is None
        reader.kill()
    assert still_there


KILLED = """
import os, signal, sys
from pathlib import Path
from specdec_core.base import files

files._exchanged = lambda one, other: False  # as on NFS
rename, left = Path.rename, int(sys.argv[2])

def killed(path, target):
    global left
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return rename(path, target)

Path.rename = killed
with files.atomic_folder(Path(sys.argv[1])) as new:
    (new / "file").write_text("new")
"""


@pytest.mark.parametrize(("renames", "found"), [(0, "old"), (1, "old"), (2, "new"), (3, "new")])
def test_where_folders_cannot_be_exchanged_a_kill_keeps_one_of_them(tmp_path, renames, found):
    path = tmp_path / "folder"
    with atomic_folder(path) as new:
        (new / "file").write_text("old")
    command = [sys.executable, "-c", KILLED, path, str(renames)]
    killed = subprocess.run(command, check=False)
    assert killed.returncode == (0 if renames == 3 else -signal.SIGKILL)
    if renames % 2:
        remove_leftovers(tmp_path, "folder")
    else:
        with pytest.raises(KeyboardInterrupt), atomic_folder(path):
            raise KeyboardInterrupt
    assert (path / "file").read_text() == found


def test_where_folders_cannot_be_exchanged_an_interruption_keeps_one_of_them(tmp_path, monkeypatch):
    path, rename = tmp_path / "folder", Path.rename
    with atomic_folder(path) as new:
        (new / "file").write_text("old")

    def interrupted(place, target):
        renamed = rename(place, target)
        if place == path:
            raise KeyboardInterrupt
        return renamed

    monkeypatch.setattr(files, "_exchanged", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_folder(path) as new:
        (new / "file").write_text("new")
    assert (path / "file").read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
