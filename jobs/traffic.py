"""Starts a command beside a server when the server's traffic has changed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from specdec_core.base.errors import UserError, os_reason

if TYPE_CHECKING:
    from cluster.serving.control import RunningServer

LOOK = 5.0  # seconds between looks for alarms
SIGNAL = "SPECDEC_DRIFT"  # in the environment of the command: what has changed


def read_command(text: str | None) -> tuple[str, ...]:
    """The words of `--on-drift`. Raises :class:`UserError` for no program."""
    if text is None:
        return ()
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"--on-drift {text}: {str(error).lower()}") from None
    if not words or shutil.which(words[0]) is None:
        raise UserError(f"--on-drift {text}: no such program; expected a command")
    return words


@contextmanager
def watched(
    server: RunningServer, command: Sequence[str], warn: Callable[[str], None]
) -> Iterator[None]:
    """During the block, start `command` when `server` raises an alarm of changed traffic. At most
    one command runs at a time. `warn` gets messages."""
    over = Event()

    def look() -> None:
        known: list[Any] | None = None  # alarms
        running: subprocess.Popen[bytes] | None = None
        while not over.wait(LOOK):
            try:
                alarms = server.health().get("drift", [])
            except UserError:  # the server starts an engine again, or ends
                continue
            if running is not None and running.poll() is None:
                continue  # what is raised meanwhile is heard afterwards
            new = [] if known is None else [a["signal"] for a in alarms if a not in known]
            known = alarms
            if new:
                warn(f"the traffic has changed ({new[-1]}): {shlex.join(command)}")
                running = _started(command, new[-1], warn)

    thread = Thread(target=look, name="traffic", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=10)


def _started(
    command: Sequence[str], signal: str, warn: Callable[[str], None]
) -> subprocess.Popen[bytes] | None:
    """The process of the command, which continues when the server ends; None where it does not
    start."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {SIGNAL: signal},
            start_new_session=True,
        )
    except OSError as error:
        warn(f"--on-drift: {os_reason(error)}")
        return None
