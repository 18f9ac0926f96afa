"""Commands run in this process: a process of their own would spend seconds on imports."""

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
from typing import Any

import psutil
import pytest
import yaml

from specdec_core.config import PairSpec
from specdec_core.search.plan import Plan


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


def config_file(folder: Path, spec: PairSpec, drafter: object = None, name: str = "config") -> Path:
    """A file that `--config` takes: the pair, and a configuration with this drafter."""
    path = folder / f"{name}.yaml"
    content = {"pair": spec.model_dump(mode="json"), "configuration": {"drafter": drafter}}
    path.write_text(yaml.safe_dump(content))
    return path


# Of a sweep that is over soon.
QUICK = {
    "finalists": 1,
    "repeats": 1,
    "forwards": {"widths": [1, 3], "contexts": [16], "batches": [1], "repeats": 2},
}


def plan_file(folder: Path, name: str = "sweep", **plan: object) -> Path:
    """A sweep file with this content."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(plan))
    return path


# Drafters of a search that a pair on one device cannot try whose only draft is `mine`.
UNTRIED: list[dict[str, Any]] = [
    {"kind": "draft_model", "draft": "theirs"},
    {"kind": "draft_model", "policy": {"kind": "specdecpp", "head": "*"}},
    {"kind": "pearl"},
]


def sweep_plan(spec: PairSpec, prompts: Path, /, **changes: object) -> Plan:
    """The plan of a sweep that times three finalists twice; `changes` replace parts of it."""
    content = {"pair": spec.model_dump(), "prompts": {"source": str(prompts)}, **QUICK}
    return Plan.model_validate({**content, "finalists": 3, "repeats": 2, **changes}).resolve()


def server_plan(folder: Path, spec: PairSpec, prompts: int, limit: int | None = None) -> Path:
    """The file of a plan that sweeps a server's chains and trees under two clients."""
    source = prompts_file(folder, [f"x{n} = {n} +" for n in range(prompts)])
    fixed = {"kind": "fixed", "max_tokens": [2, 3]}
    return plan_file(
        folder,
        pair=spec.model_dump(mode="json"),
        prompts={"source": str(source), "limit": limit},
        max_new_tokens=8,
        workload={"clients": [2], "requests": 4},
        search=[
            {"drafter": {"kind": "draft_model", "policy": fixed}},
            {"drafter": {"kind": "tree", "branching": [2, 1]}},
        ],
        live={"finalists": 1, "repeats": 1, "requests": 4, "within": 0.9},
    )


def far_profile(folder: Path, target: float = 0.1, draft: float = 0.001) -> Path:
    """A file that `--profile` takes: what forwards cost on another machine, in seconds."""
    path = folder / "far.yaml"
    path.write_text(f'{{device: far away, target: {target}, drafts: {{"*": {draft}}}}}')
    return path


def ran(*command: object, **options: Any) -> str:
    """What a process printed that ended well."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_until(done: Callable[[], object], seconds: float = 120) -> None:
    """Returns once `done` is true; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it is not so"
        time.sleep(0.02)


def started(home: Path, *command: object, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A Python process of its own session in the workspace `home`, beside no cluster and no store
    of this process. `command` follows `python`, which follows `before`."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
    return subprocess.Popen(
        [*before, sys.executable, *map(str, command)],
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
        wait_until(lambda: process.poll() is not None or ready(), 240)
        assert process.poll() is None, process.communicate()[0]
        process.send_signal(how)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    return output


def printed(done: Done) -> str:
    """What a command that ended well printed, on one line."""
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def assert_shown(done: Done, *texts: object) -> None:
    """A command has ended well, and these texts are in what it printed."""
    assert done.returncode == 0, done.stdout + done.stderr
    for text in texts:
        assert str(text) in done.stdout


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


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
