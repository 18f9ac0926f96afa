"""A program that a model wrote passes by its values alone and reaches nothing outside."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from textwrap import indent

import psutil
import pytest

from research.drift import sandbox
from research.drift.sandbox import check_sandbox, passes
from specdec_core.base.errors import UserError

try:
    check_sandbox()
except UserError as error:  # whatever this machine does not allow
    pytest.skip(str(error), allow_module_level=True)

NEXT = """
from random import random
def check(f):
    for x in (random(), 7):
        assert f(x) == x + 1
"""


def holds(*statements: str) -> bool:
    """Whether these statements run to their end inside of the sandbox."""
    body = indent("\n".join(statements), "    ")
    return passes(
        f"def f():\n{body}\n    return True", "f", "def check(f):\n    assert f() is True"
    )


def refused(*statements: str) -> bool:
    """Whether the last of these statements, and no other, raises an error inside of the sandbox."""
    *before, last = statements
    attempt = ("try:", f"    {last}", "except Exception: return True", "return False")
    return holds(*before, *attempt)


def test_a_program_passes_by_the_values_that_its_tests_expect() -> None:
    assert passes("import math\ndef f(x):\n    print('x' * 10)\n    return x + 1", "f", NEXT)
    assert not passes("def f(x): return x", "f", NEXT)
    assert not passes("def f(x): raise ValueError", "f", NEXT)
    assert not passes("def f(x)", "f", NEXT)
    assert not passes("", "f", NEXT)
    given = "def check(f):\n    assert f([1], y=(2, {3: 'ü\\ud800'})) == {1: (True, None, {2.5})}"
    assert passes("def f(x, y): return {1: (True, None, {2.5})}", "f", given)
    counted = "def check(f):\n    assert f('aab') == {'a': 2, 'b': 1}"
    assert passes("from collections import Counter as f", "f", counted)
    helped = "def half(x):\n    return x / 2\n\n" + NEXT.replace("f(x)", "half(f(x)) * 2")
    assert passes("def f(x): return x + 1", "f", helped)


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "def f(x):\n    import os; os._exit(0)",
        "def f(x):\n    raise SystemExit(0)",
        # a wrapper's verdict, and values, on whatever descriptor there is
        "import os\n"
        "for n in range(64):\n"
        "    for said in (b'the program came to its end', b'8\\n' * 9):\n"
        "        try: os.write(n, said)\n"
        "        except OSError: pass\n"
        "os._exit(0)",
        "class Equal(float):\n    __eq__ = lambda self, other: True\ndef f(x): return Equal()",
        "import builtins\nbuiltins.AssertionError = builtins.SystemExit = type(None)\n"
        "def f(x): return x",
        "import sys\nsys._getframe(1).f_globals['test'] = print\n"
        "sys._getframe(1).f_globals['ast'].literal_eval = print\ndef f(x): return x",
    ],
)
def test_leaving_early_or_changing_the_interpreter_is_no_pass(program: str) -> None:
    assert not passes(program, "f", NEXT)


def test_time_and_memory_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not holds("x = [0] * (1 << 29)")  # 4 GB
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    assert not holds("while True: pass")
    monkeypatch.setattr(sandbox, "_SETTING_UP", 0)
    memory = (1 << 30) + (time.time_ns() % (1 << 20)) * 4096  # an argument to find the processes by
    monkeypatch.setattr(sandbox, "MEMORY", memory)
    assert not holds("import time; time.sleep(60)")
    for _ in range(100):
        lines = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
        if not any(str(memory) in line for line in lines):
            return
        time.sleep(0.05)
    raise AssertionError("a process is left")


def test_a_program_sees_no_file_no_process_and_no_variable(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    assert refused(f"open({str(kept)!r})")
    assert refused("import os", "os.listdir('/proc')")
    assert refused("open('/etc/passwd')")
    assert holds("import os", "assert not os.environ.get('HOME')")
    assert refused("import os", "os.kill(-1, 9)")  # none but itself and its parent
    assert kept.read_text() == "kept"


def test_mounts_and_namespaces_stay_as_they_are() -> None:
    libc = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)"
    library = Path(socket.__file__)
    places = [place.encode() for place in ("/", str(library.parent), "/usr/lib", "/lib", "/tmp")]
    flags = (0x10000000, 0x20000, 0x40000000)  # CLONE_NEWUSER, _NEWNS, _NEWNET
    assert holds(
        libc,
        f"for place in {places}:",
        "    assert libc.mount(None, place, None, 0x1020, None) == -1",  # MS_REMOUNT | MS_BIND
        "    assert libc.umount2(place, 2) == -1",  # MNT_DETACH
        "    assert libc.mount(b'tmpfs', place, b'tmpfs', 0, None) == -1",
        f"assert all(libc.unshare(flag) == -1 for flag in {flags})",
        "assert not any(libc.prctl(23, n) for n in range(41))",  # PR_CAPBSET_READ
    )
    assert refused(f"open({str(library)!r}, 'a')")
    assert refused("open('/new', 'w')")
    assert refused("open('/dev/new', 'w')")


def test_files_have_a_size_in_all_by_mapping_them_too() -> None:
    half = sandbox.WRITTEN // 2
    assert holds("open('x', 'w').write('x')", "assert open('/tmp/x').read() == 'x'")
    assert refused(f"open('x', 'wb').truncate({sandbox.WRITTEN + 1})")
    fill = ("import mmap, os", "def fill(name):", "    file = open(name, 'w+b')")
    fill += (
        f"    file.truncate({half})",
        f"    mmap.mmap(file.fileno(), {half})[:] = b'x' * {half}",
    )
    assert holds(*fill, "fill('a')")
    assert not holds(*fill, "for name in 'abc': fill(name)")
    assert refused("import os", "os.memfd_create('x')")
    assert holds("import ctypes", "assert ctypes.CDLL(None).shmget(0, 4096, 0o1600) == -1")


def test_no_socket_is_reached(tmp_path: Path) -> None:
    named = str(tmp_path / "socket")
    for family, address in (
        (socket.AF_INET, ("127.0.0.1", 0)),
        (socket.AF_UNIX, named),
        (socket.AF_UNIX, f"\0{tmp_path}"),
    ):
        with socket.socket(family) as server:
            server.bind(address)
            server.listen()
            place = server.getsockname()
            connect = f"socket.socket({int(family)}).connect({place!r})"
            assert refused("import socket", connect)
    assert refused("import socket", "socket.socketpair()")


def test_there_is_no_second_process_and_no_thread() -> None:
    assert refused("import os", "os.fork()")
    assert refused("import threading", "threading.Thread(target=print).start()")
    assert refused("import subprocess, sys", "subprocess.run([sys.executable, '-c', ''])")


def test_nothing_of_this_process_is_inherited(tmp_path: Path) -> None:
    secret = (tmp_path / "secret").open("w+")
    assert holds(
        *("import os, stat", "kinds = set()", "for n in range(256):"),
        *("    try: kinds.add(stat.S_IFMT(os.fstat(n).st_mode))", "    except OSError: pass"),
        "assert kinds == {stat.S_IFIFO, stat.S_IFCHR}",
    )
    secret.close()


def test_without_bubblewrap_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    check_sandbox.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"expected Linux .*apt install bubblewrap.*no `bwrap`"):
        passes("def f(x): return x + 1", "f", NEXT)
    check_sandbox.cache_clear()
