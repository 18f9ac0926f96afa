"""What --config takes: a file, or the beginning of an id in the workspace's sweeps."""

from pathlib import Path

import pytest

from jobs.choice import choose
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.search.folder import find_trial
from tests.registered import SUFFIX, SWEEP


def test_an_ids_beginning_chooses_its_configuration_and_pair(swept):
    choice, source, _ = choose(Path(SUFFIX.id[:4]))
    assert choice.configuration.id == SUFFIX.id
    assert choice.pair == find_trial(swept / "sweeps", SUFFIX.id)[0].pair
    assert source == f"{SUFFIX.id} of sweep {SWEEP}"


def test_a_file_comes_before_an_id_of_its_name(swept, tmp_path):
    file = tmp_path / SUFFIX.id[:4]
    file.write_text("configuration: {drafter: null}")
    choice, source, _ = choose(file)
    assert choice.configuration.drafter is None
    assert source == str(file)


def test_what_is_neither_is_said_in_one_line(swept):
    with pytest.raises(UserError) as raised:
        choose(Path("00ff00ff"))
    line = "--config 00ff00ff: no such file, and as the beginning of an id: no config"
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)


def test_an_id_that_fits_several_is_refused(swept):
    result, trial = find_trial(swept / "sweeps", SUFFIX.id)
    many = (Configuration(drafter=SuffixSettings(per_match=k / 100)) for k in range(10_000))
    alike = next(one for one in many if one.id[:2] == SUFFIX.id[:2] and one != SUFFIX)
    more = [*result.trials, trial.model_copy(update={"configuration": alike})]
    result.model_copy(update={"trials": more}).save(swept / "sweeps" / SWEEP)
    with pytest.raises(UserError, match=f"{SUFFIX.id[:2]}: fits 2 configurations of {SWEEP}$"):
        choose(Path(SUFFIX.id[:2]))
    assert choose(Path(alike.id))[0].configuration == alike


def test_a_sweep_that_cannot_be_read_hides_no_other(swept):
    latest = swept / "sweeps" / "zz" / "sweep.json"
    latest.parent.mkdir()
    latest.write_text('{"name": "zz", "colour": 1}')
    assert choose(Path(SUFFIX.id[:4]))[0].configuration.id == SUFFIX.id
    with pytest.raises(UserError, match="no configuration"):
        choose(Path("00ff00ff"))
