"""Testing a program that a model wrote.

The program runs in a sandbox of bubblewrap (Linux): without a network, without this machine's files
but the interpreter and its library, with an empty folder of :data:`WRITTEN` bytes, without
privileges, in a process that cannot start another one, open a socket or get memory that
:data:`MEMORY` does not count, and for :data:`SECONDS`. It is no protection from a flaw of the
kernel.

The tests run in a second such sandbox. They call the program's function through a pipe, which
carries Python literals, and they alone give the verdict, as the second sandbox's exit status. So a
program can end itself, write to its descriptors and change its interpreter, and passes only by
giving the values that the tests expect.
"""

from __future__ import annotations

import os
import platform
import shutil
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from research.drift import inside
from specdec_core.base.errors import UserError

SECONDS = 5
MEMORY = 1 << 30  # bytes of address space
WRITTEN = 1 << 24  # bytes in files
_SETTING_UP = 5  # seconds more, for namespaces and the interpreter's start
# A virtual environment's own is a link or a copy that does not find its library from elsewhere.
_PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))

Stream = int | IO[bytes] | None

# System calls that are refused, of each machine its number in seccomp (AUDIT_ARCH_…) and theirs:
_REFUSED = {
    "x86_64": (
        0xC000003E,
        (56, 57, 58, 435),  # clone, fork, vfork, clone3
        (41, 53, 425, 426, 427),  # socket, socketpair, io_uring_…
        (319, 447, 29, 64, 68, 240),  # memfd_create, memfd_secret, shmget, semget, msgget, mq_open
        (272, 308, 165, 101),  # unshare, setns, mount, ptrace
        (248, 249, 250, 321, 298, 323),  # add_key, request_key, keyctl, bpf, perf_…, userfaultfd
    ),
    "aarch64": (
        0xC00000B7,
        (220, 435),
        (198, 199, 425, 426, 427),
        (279, 447, 194, 190, 186, 180),
        (97, 268, 40, 117),
        (217, 218, 219, 280, 241, 282),
    ),
}
_X32 = 0x40000000  # the first number of x86-64's other calls, which are refused altogether


def passes(program: str, entry: str, tests: str) -> bool:
    """Whether a Python program's function `entry` passes `tests`, a program that has a function
    `check` for it, in time. Raises :class:`UserError` where there is no sandbox."""
    check_sandbox()
    with TemporaryFile() as given:
        given.write(ascii((program, entry, tests)).encode())
        given.seek(0)
        with (
            _start("answer", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as written,
            _start("test", given.fileno(), stdin=written.stdout, stdout=written.stdin) as testing,
        ):
            try:
                return testing.wait(SECONDS + _SETTING_UP) == 0
            except subprocess.TimeoutExpired:
                return False
            finally:
                written.kill()
                testing.kill()


@cache
def check_sandbox() -> None:
    """Raises :class:`UserError` where programs cannot be shut in."""
    try:
        with _start("nothing", stderr=subprocess.PIPE) as trial:
            said = trial.communicate()[1].decode(errors="replace").strip()
        if not trial.returncode:
            return
    except (OSError, LookupError) as error:
        said = str(error)
    raise UserError(
        "programs that a model wrote are run in a sandbox, which this machine does not allow:"
        " expected Linux on x86_64 or aarch64 with bubblewrap (`apt install bubblewrap`) and user"
        f" namespaces ({said.splitlines()[-1] if said else 'no reason given'})"
    )


def _start(
    role: str,
    *passed: int,
    stdin: Stream = subprocess.DEVNULL,
    stdout: Stream = subprocess.DEVNULL,
    stderr: Stream = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start :mod:`inside` in a sandbox, with the descriptors `passed`. Raises :class:`OSError` and
    :class:`LookupError` where that is impossible."""
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise FileNotFoundError("no `bwrap` on this machine")
    program = Path(inside.__file__).read_text(encoding="utf-8")
    python = [_PYTHON, "-I", "-S", "-c", program]
    numbers = map(str, (SECONDS, MEMORY, WRITTEN, *passed))
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "wb") as file:
            file.write(_filter())
        return subprocess.Popen(
            [bubblewrap, "--seccomp", str(reading), *_root(), *python, role, *numbers],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(reading, *passed),
            env={},
            cwd="/",
        )
    finally:
        os.close(reading)


def _root() -> list[str]:
    """Options that leave nothing but the interpreter, its library and the C library to be read."""
    needed = [_PYTHON, "/etc/ld.so.cache"]
    for prefix in ("/", "/usr", sys.base_prefix, sys.base_exec_prefix):
        needed += [f"{prefix.rstrip('/')}/lib", f"{prefix.rstrip('/')}/lib64"]
    return [
        *("--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", "--size", str(WRITTEN), "--tmpfs", "/tmp"),
        *(word for place in dict.fromkeys(needed) for word in ("--ro-bind-try", place, place)),
        *("--dev-bind", "/dev/null", "/dev/null", "--remount-ro", "/", "--chdir", "/tmp"),
    ]


@cache
def _filter() -> bytes:
    """The seccomp program (classic BPF) that refuses calls with EPERM. Raises
    :class:`LookupError` for another machine."""
    machine, *groups = _REFUSED[platform.machine()]
    load, equal, at_least, leave = 0x20, 0x15, 0x35, 0x06  # BPF_LD, BPF_JMP | BPF_JEQ, …, BPF_RET
    killed, refused, allowed = 0x80000000, 0x00050001, 0x7FFF0000  # SECCOMP_RET_…
    steps = [(load, 0, 0, 4), (equal, 1, 0, machine), (leave, 0, 0, killed), (load, 0, 0, 0)]
    for jump, number in [(at_least, _X32), *((equal, n) for group in groups for n in group)]:
        steps += [(jump, 0, 1, number), (leave, 0, 0, refused)]
    return b"".join(struct.pack("HBBI", *step) for step in [*steps, (leave, 0, 0, allowed)])
