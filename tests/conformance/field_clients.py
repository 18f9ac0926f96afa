"""Clients of other projects against a server: vLLM's benchmark and schemathesis.

Each is a program of an environment of its own; none of them is imported here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specdec_core.base.errors import UserError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMIT = 1800.0  # seconds for one client
# Which values go together is more than the schema says; tests/cluster/serving/http/test_openapi.py
# asks that nothing else is refused that the schema allows.
_UNCHECKED = "positive_data_acceptance"
# vLLM's command line takes metadata that its CPU build lacks; its parts are there.
_VLLM_BENCH = (
    "import argparse\nfrom vllm.benchmarks.serve import add_cli_args, main\n"
    "parser = argparse.ArgumentParser()\nadd_cli_args(parser)\nmain(parser.parse_args())"
)


@dataclass(frozen=True)
class Outcome:
    """A client's report. `said` is the end of its output where the client itself failed."""

    client: str
    path: str
    requests: int
    failed: int
    said: str = ""

    @property
    def passed(self) -> bool:
        return self.requests > 0 and not self.failed and not self.said


@dataclass(frozen=True)
class Target:
    """The server at `url`, its model's name and the folder of its tokenizer. It may answer no
    `chats`."""

    url: str
    model: str
    tokenizer: str
    key: str | None = None
    chats: bool = True

    @property
    def paths(self) -> tuple[str, ...]:
        """The protocols to speak."""
        return (COMPLETIONS, CHAT) if self.chats else (COMPLETIONS,)

    @property
    def environment(self) -> Mapping[str, str]:
        """For clients, which find their key there."""
        mine = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return mine if self.key is None else mine | {"OPENAI_API_KEY": self.key}


def vllm_bench(python: Path, target: Target, requests: int) -> Iterator[Outcome]:
    """`vllm bench serve` in each protocol, four requests at a time."""
    for path in target.paths:
        kind = "openai-chat" if path == CHAT else "openai"
        with TemporaryDirectory() as folder:
            options = ["--backend", kind, "--endpoint", path, "--base-url", target.url]
            options += ["--model", target.model, "--tokenizer", target.tokenizer]
            options += ["--dataset-name", "random", "--random-input-len", "24"]
            options += ["--random-output-len", "16", "--num-prompts", str(requests)]
            options += ["--max-concurrency", "4", "--save-result"]
            options += ["--result-dir", folder, "--result-filename", "result.json"]
            done = _run([str(python), "-c", _VLLM_BENCH, *options], target, folder)
            result = _read(Path(folder) / "result.json")
            failed = int(result.get("failed", 0))
            asked = int(result.get("completed", 0)) + failed
            yield Outcome("vllm bench serve", path, asked, failed, _output(done, result))


def schemathesis(program: Path, target: Target, cases: int) -> Iterator[Outcome]:
    """Requests that follow `/openapi.json` or break it, up to `cases` for each operation beside
    those that cover its keywords: what is answered is documented, and is no server error."""
    options = ["--max-examples", str(cases), "--exclude-checks", _UNCHECKED]
    options += ["--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--no-color"]
    options += ["--suppress-health-check", "all", "--generation-database", "none"]
    options += ["--header", f"Authorization: Bearer {target.key}"] if target.key else []
    with TemporaryDirectory() as folder:
        document = f"{target.url}/openapi.json"
        done = _run([str(program), "run", document, *options], target, folder)
    generated, failed = (
        int(found[1]) if (found := re.search(pattern, done.stdout)) else 0
        for pattern in (r"(\d+) generated", r"(\d+) found")
    )
    said = done.stdout[-8000:] if done.returncode else ""
    yield Outcome("schemathesis", "/openapi.json", generated, failed, said)


def _run(command: Sequence[str], target: Target, folder: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=target.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]}: no such program") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]}: not done within {LIMIT:g} s") from None


def _read(path: Path) -> dict[str, Any]:
    """A client's result; empty where it wrote none."""
    return json.loads(path.read_text()) if path.exists() else {}


def _output(done: subprocess.CompletedProcess[str], result: Mapping[str, object]) -> str:
    """The end of the output of a client that has failed."""
    return "" if result and not done.returncode else done.stdout[-2000:] or "it said nothing"
