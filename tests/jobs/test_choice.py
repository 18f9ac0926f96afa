"""What --config takes: a file, or the beginning of an id in the workspace's sweeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.choice import choose
from specdec_core.base.errors import UserError
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
    with pytest.raises(UserError) as told:
        choose(Path(given))
    assert str(told.value).startswith(message)
    assert "\n" not in str(told.value)


def test_an_id_that_fits_several_is_refused(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, trial = find_trial(inside / "sweeps", BANDIT)
    twins = {first: own for own in result.trials if (first := own.id[0])}
    shared = next((f for f in twins if sum(t.id[0] == f for t in result.trials) > 1), None)
    assert shared is not None
    with pytest.raises(UserError, match=f"{shared}: fits"):
        choose(Path(shared))
