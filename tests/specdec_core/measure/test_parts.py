"""The runs of a comparison are kept until it is whole."""

import pytest

from specdec_core.base.errors import UserError
from specdec_core.config import PairSpec, RunnerSettings
from specdec_core.evidence.load.result import LoadRow
from specdec_core.measure.parts import Parts
from specdec_core.search.load.records import LoadRecord


def test_one_process_at_a_time_measures_a_comparison(tmp_path):
    with (
        Parts.open(tmp_path, {"plan": 1}, LoadRecord),
        pytest.raises(UserError, match="this comparison is running in another process"),
        Parts.open(tmp_path, {"plan": 1}, LoadRecord),
    ):
        pass


def test_fresh_forgets_what_was_kept(tmp_path):
    row = LoadRow(name="autoregressive", group="specdec")
    first = PairSpec(runner=RunnerSettings(target_dtype="bfloat16"))
    with Parts.open(tmp_path, {}, LoadRecord) as parts:
        assert parts.pair(first) == first
        parts.keep(f"0-{row.key}", [])
    with Parts.open(tmp_path, {}, LoadRecord) as parts:
        assert parts.pair(PairSpec()) == first  # every run has the same data types
        assert parts.get(f"0-{row.key}") == []
        assert parts.get(f"1-{row.key}") is None
        assert parts.get(f"0-{row.model_copy(update={'version': '2'}).key}") is None
    with Parts.open(tmp_path, {}, LoadRecord, fresh=True) as parts:
        assert parts.get(f"0-{row.key}") is None
    assert not tmp_path.exists()  # without a run nothing is left
