"""Commands run in this process: a process of their own would spend seconds on imports."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Done:
    """How a command ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Call a job's `main` as its program does, in the workspace `home`, with arguments."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("COLUMNS", "120")

    def call(main: Callable[..., None], home: Path, *arguments: object) -> Done:
        from jobs.console import run  # the console keeps the width that it is made with

        monkeypatch.setenv("SPECDEC_HOME", str(home))
        monkeypatch.setattr(sys, "argv", ["job", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            run(main)
        return Done(exit.value.code or 0, *capsys.readouterr())

    handler = signal.getsignal(signal.SIGTERM)  # a sweep sets its own
    yield call
    signal.signal(signal.SIGTERM, handler)
