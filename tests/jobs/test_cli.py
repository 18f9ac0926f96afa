"""`specdec` finds every job, starts quickly, and answers bad input with one line and code 2."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from jobs.cli import COMMANDS, app, studies
from jobs.cli import command as command_of
from specdec_core.recordings.plan import RecordingPlan
from specdec_core.recordings.schema import Header
from tests.commands import Command

ROOT = Path(__file__).parents[2]


def test_the_list_of_commands_needs_no_heavy_import() -> None:
    script = (
        "import sys\n"
        "from jobs.cli import app\n"
        "try:\n    app(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'ray', 'mlflow', 'transformers', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = {name.split()[0] for name in COMMANDS} | {"lab"}
    assert len(listed) <= 16
    for name in listed:
        assert name in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, command: Command, tmp_path: Path) -> None:
    done = command(app, tmp_path, *name.split(), "--help")
    assert done.returncode == 0, done.stderr
    assert name in done.stdout


@pytest.mark.parametrize("name", studies())
def test_every_study_explains_itself(name: str, command: Command, tmp_path: Path) -> None:
    done = command(app, tmp_path, "lab", name, "--help")
    assert done.returncode == 0, done.stderr
    assert name in done.stdout


def test_help_names_the_defaults_that_settings_have() -> None:
    header, plan = Header.model_fields, RecordingPlan.model_fields
    defaults = {name: header[name].default for name in ("max_draft", "mixing")}
    defaults["max_new_tokens"] = plan["max_new_tokens"].default
    options = {p.name: p for p in typer.main.get_command(command_of("record")).params}
    for option, default in defaults.items():
        told = " ".join(str(getattr(options[option], "help", "")).split())
        assert re.search(rf"; unset, (as in the file, or )?{default}\.$", told), (option, told)


def test_the_help_of_a_draft_says_how_it_is_named(command: Command, tmp_path: Path) -> None:
    assert "NAME=MODEL" in command(app, tmp_path, "record", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", "--config", "missing.yaml"], "missing.yaml: no such file"),
        (["sweep", "--config", "unknown.yaml"], "thresold: unknown key"),
        (["sweep", "--config", "negative.yaml"], "threshold"),
        (["sweep", "--prompts", "missing.jsonl"], "missing.jsonl"),
        (["sweep", "--prompts", "broken.jsonl"], "broken.jsonl:2"),
        (["sweep", "--prompts", "empty.jsonl"], "empty.jsonl:1"),
        (["serve", "--config", "missing.yaml"], "missing.yaml: no such file"),
        (["serve"], "no champion"),
        (["report", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    arguments: list[str],
    message: str,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path.parent / 'elsewhere.db'}")
    policy = "search: [{drafter: {kind: draft_model, policy: {kind: svip, %s}}}]\n"
    (tmp_path / "unknown.yaml").write_text(policy % "thresold: 1")
    (tmp_path / "negative.yaml").write_text(policy % "threshold: -1")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "def"}\n{"prompt": \n')
    (tmp_path / "empty.jsonl").write_text('{"prompt": ""}\n')
    before = sorted(tmp_path.iterdir())
    done = command(app, tmp_path, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    error = done.stderr.strip().splitlines()
    assert len(error) == 1, done.stderr
    assert error[0].startswith("error: ")
    assert message in error[0]
    assert sorted(tmp_path.iterdir()) == before


def test_an_unknown_command_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", "swep"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2
    assert "swep" in done.stderr
