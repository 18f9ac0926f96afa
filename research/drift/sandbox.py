"""Running a program that a model wrote.

It runs in namespaces of its own (Linux, util-linux): without a network, with all file systems read
only, and with processes that end with it. Its time, memory and output are limited, and it sees none
of the environment's variables. So it can reach no other machine, change no file, signal no other
process, and hold the machine up for no longer than :data:`SECONDS`. It can read what this user can
read, and tell nobody. It is no protection from a flaw of the kernel.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from specdec_core.base.errors import UserError

SECONDS = 5
MEMORY = 1 << 30  # bytes of address space
_SETTING_UP = 5  # seconds more, for namespaces and the interpreter's start
_ENDED = b"the program came to its end"

_NAMESPACES = (
    *("unshare", "--user", "--map-root-user", "--net", "--pid", "--mount", "--ipc"),
    *("--fork", "--kill-child", "--mount-proc"),
)
# Everything but the kernel's own file systems becomes read-only; a mount that cannot be ends this.
_READ_ONLY = r"""
set -e
while read -r device place kind rest; do
  case "$place" in /proc|/proc/*|/sys|/sys/*|/dev|/dev/pts|/dev/mqueue) continue ;; esac
  mount -o remount,bind,ro "$(printf '%b' "$place")"
done < /proc/self/mounts
exec "$@"
"""
# What the program writes is thrown away; that it came to its end is said by us, so that one that
# leaves before its tests has not passed them.
_LIMITED = f"""
import os, resource, sys
program = sys.stdin.read()
said = os.dup(2)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
exec(compile(program, "program", "exec"), {{"__name__": "__main__"}})
os.write(said, {_ENDED!r})
"""


def succeeds(program: str) -> bool:
    """Whether a Python program ends by itself, in time and without an error. Raises
    :class:`UserError` where there is no sandbox to run it in."""
    check_sandbox()
    return _run(program)[0]


@cache
def check_sandbox() -> None:
    """Raises :class:`UserError` where programs cannot be shut in."""
    ended, said = _run("")
    if not ended:
        raise UserError(
            "programs that a model wrote are run without network and with all files read-only,"
            " which this machine does not allow: expected Linux with `unshare` and user namespaces"
            f" ({said.strip().splitlines()[-1] if said.strip() else 'no reason given'})"
        )


def _run(program: str) -> tuple[bool, str]:
    """Whether the program succeeded, and what was said about it."""
    python = [sys.executable, "-I", "-S", "-c", _LIMITED]
    command = [*_NAMESPACES, "sh", "-c", _READ_ONLY, "sh", *python]
    try:
        done = subprocess.run(
            command,
            input=program.encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=SECONDS + _SETTING_UP,
            env={},
            cwd="/",
            check=False,
        )
    except FileNotFoundError:
        return False, "no `unshare` on this machine"
    except subprocess.TimeoutExpired:
        return False, "out of time"
    ended = done.returncode == 0 and done.stderr.endswith(_ENDED)
    return ended, done.stderr.decode(errors="replace")
