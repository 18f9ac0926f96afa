"""Runs a command until it ends or the standard input does, then ends all that it started:
`python keeper.py COMMAND…`, in a separate process group.

The process that started it holds the other end of its input, so no server outlives a parent that is
killed. If the keeper itself is killed, as Ray kills the children of a replica that ends, another
process of its group kills the rest. This project's other processes call :func:`end_with_parent`.

The command inherits that SIGTERM and SIGHUP are blocked, as they are below a local Ray, so that a
supervisor that sends them to all processes ends no server with requests under way. The command is
therefore ended by SIGINT.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from threading import Thread

STOP = 30.0  # seconds for the command to end after SIGINT


def main() -> None:
    end_group_with_this()
    # A shell has background jobs ignore it, and Ray has its workers block it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    _ignore_stops()
    Thread(target=end_with_input, args=(process,), daemon=True).start()
    code = process.wait()
    if code < 0 and -code != signal.SIGINT:  # a killed command cannot say why it ended
        number = signal.Signals(-code)
        print(f"{number.name}: {signal.strsignal(number)}", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)  # what it left behind, and this process


def end_group_with_this() -> None:
    """Start a process that kills the group when this one ends, in whatever way."""
    reading, writing = os.pipe()  # this process alone has the writing end, until it ends
    if os.fork():
        os.close(reading)
        return
    os.close(writing)
    _ignore_stops()
    os.read(reading, 1)
    os.killpg(0, signal.SIGKILL)


def _ignore_stops() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


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
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP)
    process.kill()


if __name__ == "__main__":
    main()
