"""A child process that answers JSON lines, and that never outlives its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Any

from specdec_core.base.errors import UserError


class Worker:
    """Runs `command` in a new process group; errors call it `name`.

    It gets one JSON object a line on its standard input and answers each with one line on its
    standard output, or with the reason {"error": …}. It must end when its input ends, so that it
    ends when this process is killed. Between requests it waits in a read and uses no processor
    time.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._log = TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, which then stops it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._reader = ThreadPoolExecutor(1)  # a read without end ends in `close`

    def ask(self, question: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to one question.

        Raises:
            UserError: the worker answered with an error, died (with the last line it printed),
                did not answer within `timeout` seconds, or answered with something else than a
                JSON object. It is stopped then.
        """
        try:
            self._stdin.write(json.dumps(question).encode() + b"\n")
            self._stdin.flush()
            line = self._reader.submit(self._stdout.readline).result(timeout)
        except BrokenPipeError:
            line = b""
        except TimeoutError:
            raise self._failure(f"did not answer within {timeout:g} s") from None
        if not line.endswith(b"\n"):
            self._process.wait()
            raise self._failure(f"its worker ended: {self._last_words()}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._failure(
                f"its worker answered {line[:80].strip()!r}, which is no JSON object"
            )
        if "error" in answer:
            raise self._failure(answer["error"])
        return answer

    def close(self) -> None:
        """Stop the worker and all that it started."""
        if self._log.closed:
            return
        with suppress(ProcessLookupError):  # it and its children may be gone already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.shutdown()
        with suppress(BrokenPipeError):  # of a question that the process did not read
            self._stdin.close()
        self._stdout.close()
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 10_000))
        lines = self._log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last or f"exit status {self._process.returncode}"

    def _failure(self, what: str) -> UserError:
        self.close()
        return UserError(f"{self.name}: {what}")
