"""What a target forward costs in steps of a draft model."""

import pytest

from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.break_even import BreakEvenSettings
from specdec_core.engine import Engine, forward_costs

EVEN = Configuration(drafter=DraftModelSettings(policy=BreakEvenSettings()))


def test_it_is_measured_once_for_all_engines_of_a_pair(tiny_pair, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = Engine(tiny_pair).priced(EVEN)
    assert not first.unpriced
    monkeypatch.setattr(forward_costs, "time_forward", lambda *_: pytest.fail("measured again"))
    assert Engine(tiny_pair).priced(EVEN) == first
    engine = Engine(tiny_pair, EVEN)
    assert engine.configuration.id == EVEN.id
    assert set(engine.target.lengths) == {0}
    found = engine.costs.known["draft"]
    assert first.drafter.policy.target_cost == found.candidates <= found.calls


def test_a_candidate_takes_a_call_and_a_place_in_the_targets_forward(
    tiny_pair, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = Engine(tiny_pair)
    took = {(True, 1): 10.0, (True, 5): 14.0, (False, 1): 2.0}

    def timed(runner, width):
        return took[runner is engine.target, width]

    monkeypatch.setattr(forward_costs, "time_forward", timed)
    assert engine.costs.target_cost() == 10 / 2
    assert engine.costs.target_in_candidates() == 3.33  # of 2 and (14 - 10) / 4


def test_a_cache_that_cannot_be_written_costs_a_warning(tiny_pair, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert Engine(tiny_pair).costs.target_cost() > 0
    assert "cannot be kept" in caplog.text
