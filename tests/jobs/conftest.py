"""Commands run in this process: one of their own would spend seconds on imports."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.console import run
from specdec_core.config import Sampling
from specdec_core.engine import Request
from specdec_core.models.pair import Pair
from specdec_core.prompts.prompt_sets import PromptSet, digest, load_prompts
from specdec_core.recordings.find import finish
from specdec_core.recordings.record import Recorder
from specdec_core.recordings.schema import Header, save_header, write_shard


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
        monkeypatch.setenv("SPECDEC_HOME", str(home))
        monkeypatch.setattr(sys, "argv", ["job", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            run(main)
        return Done(exit.value.code or 0, *capsys.readouterr())

    handler = signal.getsignal(signal.SIGTERM)  # a sweep sets its own
    yield call
    signal.signal(signal.SIGTERM, handler)


def record_prompts(
    pair: Pair, source: Path, folder: Path, max_new_tokens: int, sampling: Sampling | None = None
) -> None:
    """Leave in `folder` what `specdec record` would, by this process alone."""
    prompts = load_prompts(str(source), None, pair.tokenizer)
    header = Header(
        pair=pair.spec,
        fingerprints=pair.fingerprints,
        eos_token_ids=tuple(pair.eos_token_ids),
        prompts=PromptSet(source=str(source), count=len(prompts), digest=digest(prompts)),
        sampling=sampling or Sampling(),
        max_new_tokens=max_new_tokens,
        mixing=0,
    )
    requests = [
        Request(prompt.id, tuple(pair.tokenizer(prompt.text)["input_ids"]), max_new_tokens, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    save_header(header, folder)
    write_shard(Recorder(pair, header).record(list(enumerate(requests))), folder, 0)
    finish(folder)
