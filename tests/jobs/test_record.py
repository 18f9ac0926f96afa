"""`specdec record` says what it recorded, survives Ctrl-C without repeating work, and refuses bad
input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs import record
from specdec_core.recordings.schema import Recording
from tests.jobs.conftest import Command

ROOT = Path(__file__).parents[2]


def program(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "jobs.record", *map(str, arguments)]


def environment(home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return {**kept, "SPECDEC_HOME": str(home), "COLUMNS": "100"}


def whole_shards(home: Path) -> dict[Path, int]:
    """Files of whole shards and when they were written."""
    return {file: file.stat().st_mtime_ns for file in home.glob("traces/*/prompts/shard-*.parquet")}


def interrupt(home: Path, arguments: list[str | Path]) -> str:
    """Start a recording, send it Ctrl-C once a shard is written, and return what it printed."""
    with subprocess.Popen(
        program(*arguments),
        cwd=ROOT,
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as driver:
        deadline = time.monotonic() + 240
        while not whole_shards(home):
            assert driver.poll() is None, driver.communicate()[0]
            assert time.monotonic() < deadline, "no shard was written"
            time.sleep(0.02)
        driver.send_signal(signal.SIGINT)
        output = driver.communicate(timeout=60)[0]
    assert driver.returncode == 130
    return output


@pytest.mark.long
def test_a_recording_goes_on_after_ctrl_c_and_says_what_it_holds(
    command: Command, ray_running: None, tiny_pair_folders: dict[str, Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"x{i} = {i}"}) for i in range(64)))
    plan = {
        "pair": {
            "target": str(tiny_pair_folders["target"]),
            "drafts": {"noisy": str(tiny_pair_folders["draft"])},
        },
        "prompts": {"source": str(prompts)},
        "max_new_tokens": 64,
        "search": [{"drafter": {"kind": "draft_model"}}],
    }
    config = tmp_path / "sweep.yaml"
    config.write_text(json.dumps(plan))  # JSON is YAML
    home = tmp_path / "home"
    arguments: list[str | Path] = ["--config", config, "--limit", "60", "--max-draft", "9"]

    output = interrupt(home, arguments)
    assert "the same command resumes" in output
    assert "Traceback" not in output
    first = whole_shards(home)
    assert 0 < len(first) < 8

    done = command(record.main, home, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resuming: {8 * len(first)} of 60 prompts done" in done.stdout
    assert whole_shards(home).items() >= first.items()  # nothing was written again
    (folder,) = (home / "traces").iterdir()
    recording = Recording.open(folder)
    assert len(recording.prompts.ids) == 60
    assert (recording.header.max_new_tokens, recording.header.max_draft) == (64, 9)
    tokens = sum(map(len, recording.prompts.outputs))
    agreement = recording.trace("noisy").agrees.mean()
    for shown in ("noisy", f"{agreement:.3f}", f"60 prompts, {tokens:,} tokens", str(folder)):
        assert shown in done.stdout
    for following in (f"train-head --recording {folder}", f"sweep --prompts {prompts} --limit 60"):
        assert following in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "none.yaml"], r"none\.yaml: no such file"),
        (["--target", "./nowhere", "--draft", "x"], r"\./nowhere: no such folder"),
        (["--mixing", "1.5"], r"recording: mixing: .* \(got 1\.5\)"),
        (["--temperature", "-1"], r"sampling: temperature: .* \(got -1\.0\)"),
        (["--max-new-tokens", "5000", "--limit", "1"], r"prompt stdlib/.*more than the 1024 that"),
        (
            ["--max-length", "40"],
            r"prompt stdlib/.* the 40 that the pair holds \(runner\.max_length",
        ),
        (["--max-length", "0"], r"runner: max_length: .* \(got 0\)"),
        (["--chat-template", "always"], r"bundled:train: chat template always: the tokenizer has"),
        (["--chat-template", "chatml.jinja"], r"chatml\.jinja: no such file; a chat template is"),
    ],
)
def test_bad_input_is_one_line_with_exit_code_2_and_leaves_nothing(
    command: Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = command(record.main, tmp_path, *arguments)
    assert done.returncode == 2
    assert re.fullmatch(rf"error: .*{message}.*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []
