"""What --config takes: a file, or the beginning of an id in the workspace's sweeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.choice import choose
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.search.folder import find_trial
from tests.test_workspace_written_before import BANDIT, SWEEP, home, inside

__all__ = ["home", "inside"]


def test_an_ids_beginning_chooses_its_configuration_and_pair(inside: Path) -> None:
    choice, source = choose(Path(BANDIT[:4]))
    assert choice.configuration.id == BANDIT
    assert choice.pair == find_trial(inside / "sweeps", BANDIT)[0].pair
    assert source == f"{BANDIT} of sweep {SWEEP}"


def test_a_file_comes_before_an_id_of_its_name(inside: Path, tmp_path: Path) -> None:
    file = tmp_path / BANDIT[:4]
    file.write_text("configuration: {drafter: null}")
    choice, source = choose(file)
    assert choice.configuration.drafter is None
    assert source == str(file)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("00ff00ff", "--config 00ff00ff: no such file, and as the beginning of an id: no config"),
        ("missing.yaml", "missing.yaml: no such file"),
    ],
)
def test_what_is_neither_is_said_in_one_line(inside: Path, given: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        choose(Path(given))
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_an_id_that_fits_several_is_refused(
    inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, trial = find_trial(inside / "sweeps", BANDIT)
    many = (Configuration(drafter=SuffixSettings(per_match=k / 100)) for k in range(10_000))
    alike = next(candidate for candidate in many if candidate.id[:2] == BANDIT[:2])
    more = [*result.trials, trial.model_copy(update={"configuration": alike})]
    result.model_copy(update={"trials": more}).save(tmp_path / "sweeps" / "twins")
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    with pytest.raises(UserError, match=f"{BANDIT[:2]}: fits 2 configurations of {SWEEP}$"):
        choose(Path(BANDIT[:2]))
    assert choose(Path(alike.id))[0].configuration == alike
