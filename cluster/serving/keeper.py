"""Runs a command until it ends or the standard input does, then ends all that it started:
`python keeper.py COMMAND…`, in a separate process group.

The process that started it holds the other end of its input, so no server outlives a parent that is
killed. This project's other processes call :func:`end_with_parent`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from threading import Thread

STOP = 30.0  # seconds for the command to end after SIGTERM


def main() -> None:
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    Thread(target=end_with_input, args=(process,), daemon=True).start()
    process.wait()
    os.killpg(0, signal.SIGKILL)  # what it left behind, and this process


def end_with_parent() -> None:
    """Have this process end at once when its parent ends, in whatever way. Does nothing on systems
    without `pidfd_open`."""
    if not hasattr(os, "pidfd_open"):
        return
    poll = select.poll()
    poll.register(os.pidfd_open(os.getppid()), select.POLLIN)

    def wait() -> None:
        poll.poll()
        os._exit(1)

    Thread(target=wait, name="parent", daemon=True).start()


def end_with_input(process: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP)
    process.kill()


if __name__ == "__main__":
    main()
