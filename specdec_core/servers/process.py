"""Starting and stopping a server of any kind as a separate process."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from threading import RLock
from time import monotonic, sleep
from typing import IO

import httpx

from specdec_core.base import keeper
from specdec_core.base.errors import UserError

START = 1200.0  # seconds: the first start of a model may compile it, later ones find that on disk
_ENDING = 10.0  # seconds in which a keeper ends after its command, or after SIGKILL
_LOOK = 0.1  # between looks at whether it is ready
_DYING = 0.5  # in which it ends, if it does, after it has answered no more
# In a line that tells of an error; the last three are llama.cpp's.
_ERROR = re.compile(r"rror: |error while handling |error loading model|failed to initialize")

# What a started server lacks of what it was started for, by its URL and its environment; None if it
# lacks nothing.
Lacks = Callable[[str, Mapping[str, str]], str | None]


class ServerProcess:
    """A server of OpenAI's completions: `command(port)` in a separate process group. It is ready
    when `/health` answers and `lacks(url, environment)`, if that is given, finds nothing. Errors
    call it `name`. What it prints is added to the file `log`, if that is given. Another thread than
    the one that starts it may stop it, before it is started too: once stopped, it does not
    start."""

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        log: Path | None = None,
        lacks: Lacks | None = None,
    ) -> None:
        self.name, self.command, self.environment, self.log = name, command, environment, log
        self.lacks = lacks
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._began = 0  # where what the last start printed begins in the log
        self._lock = RLock()
        self._stopped = False

    def start(self, port: int) -> str:
        """Serve on a port of this machine; returns the URL once requests are answered. Raises
        :class:`UserError` where it does not get so far."""
        with self._lock:
            self._check_not_stopped()
            self._begin(port)
        url = f"http://127.0.0.1:{port}"
        deadline = monotonic() + START
        with httpx.Client(base_url=url, timeout=5, trust_env=False) as http:
            while not _answers(http):
                self.check()
                self._check_not_stopped()
                if monotonic() > deadline:
                    raise self._failure(f"its server was not ready within {START:g} s")
                sleep(_LOOK)
        if self.lacks is not None and (reason := self.lacks(url, self.environment)) is not None:
            raise self._failure(f"{reason}: {self._last_words()}")
        return url

    def _begin(self, port: int) -> None:
        # Closed in `stop`.
        self._log = TemporaryFile() if self.log is None else self.log.open("a+b")  # noqa: SIM115
        self._began = self._log.seek(0, os.SEEK_END)
        self._process = subprocess.Popen(
            [sys.executable, "-P", keeper.__file__, *self.command(port)],
            stdin=subprocess.PIPE,  # closed when the parent ends, which ends the server
            stdout=self._log,
            stderr=self._log,
            env=self.environment,
            start_new_session=True,  # Ctrl-C is for the parent, which then stops it
        )

    def _check_not_stopped(self) -> None:
        if self._stopped:
            raise UserError(f"{self.name}: stopped before it was ready")

    def check(self) -> None:
        """Raises :class:`UserError` where the server has ended unasked."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                raise self._failure(f"its server ended: {self._last_words()}")

    def stop(self, patience: float = keeper.STOP + _ENDING) -> None:
        """Stop the server and all that it started, after `patience` seconds by killing it. Stopping
        twice does nothing."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                assert self._process.stdin is not None
                self._process.stdin.close()
                try:
                    self._process.wait(patience)
                except subprocess.TimeoutExpired:
                    os.killpg(self._process.pid, signal.SIGKILL)
                    self._process.wait(_ENDING)
                self._process = None
            if self._log is not None:
                self._log.close()
                self._log = None

    def _failure(self, what: str) -> UserError:
        self.stop()
        kept = f" (log: {self.log})" if self.log is not None else ""
        return UserError(f"{self.name}: {what}{kept}")

    def _last_words(self) -> str:
        """The last line of the log that tells of an error, else its last one."""
        if self._log is None:
            return "it was stopped"
        self._log.seek(max(self._began, self._log.seek(0, os.SEEK_END) - 20_000))
        text = self._log.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        # A front end may say last only that its engine failed "above".
        errors = [line for line in lines if _ERROR.search(line) and "above" not in line]
        return [*lines[-1:], *errors[-1:]][-1] if lines else "it said nothing"


@contextmanager
def running(server: ServerProcess) -> Iterator[str]:
    """A server during the block, on a free port; yields its URL. Where it has ended by itself, an
    error of the block becomes one that says why."""
    try:
        url = server.start(free_port())
        try:
            yield url
        except UserError:
            sleep(_DYING)
            server.check()
            raise
    finally:
        server.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
