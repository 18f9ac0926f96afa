"""Commands run in this process: a process of their own would spend seconds on imports."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from specdec_core.config import PairSpec


@dataclass(frozen=True)
class Done:
    """How a command ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]
ROOT = Path(__file__).parents[1]


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


def prompts_file(folder: Path, texts: Iterable[str], name: str = "prompts") -> Path:
    """A file of prompts in `folder`."""
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    return path


def config_file(folder: Path, spec: PairSpec, drafter: object = None) -> Path:
    """A file that `--config` takes: the pair, and a configuration with this drafter."""
    path = folder / "config.yaml"
    content = {"pair": spec.model_dump(mode="json"), "configuration": {"drafter": drafter}}
    path.write_text(yaml.safe_dump(content))
    return path


def started(home: Path, *command: object) -> subprocess.Popen[str]:
    """A Python process of its own session in the workspace `home`, beside no cluster and no store
    of this process. `command` follows `python`."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**kept, "SPECDEC_HOME": str(home), "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def stopped(
    home: Path, command: Sequence[object], ready: Callable[[], object], how: signal.Signals
) -> str:
    """Start a process, send it `how` once it is `ready`; returns what it printed."""
    with started(home, *command) as process:
        deadline = time.monotonic() + 240
        while not ready():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "it is not ready"
            time.sleep(0.02)
        process.send_signal(how)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    return output


def assert_refused(done: Done, message: str) -> None:
    """Bad input ends a command with exit code 2 and one line, which has this text or pattern in
    it."""
    assert done.returncode == 2, done
    assert re.fullmatch("error: .*\n", done.stderr), done.stderr
    assert message in done.stderr or re.search(message, done.stderr), done.stderr


def children(name: str, recursive: bool = True) -> list[psutil.Process]:
    """The processes that this one has started, whose command has this in it."""
    found = []
    for process in psutil.Process().children(recursive=recursive):
        with suppress(psutil.Error):  # it has just ended
            if name in " ".join(process.cmdline()):
                found.append(process)
    return found
