"""What a target forward costs in steps of a draft model."""

from __future__ import annotations

import pytest

from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.break_even import BreakEvenSettings
from specdec_core.engine import Engine, forward_costs
from specdec_core.models.pair import Pair

EVEN = Configuration(drafter=DraftModelSettings(policy=BreakEvenSettings()))


def test_it_is_measured_once_for_all_engines_of_a_pair(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = Engine(tiny_pair).priced(EVEN)
    assert first.drafter is not None
    assert not first.unpriced
    monkeypatch.setattr(forward_costs, "_time_token", lambda _: pytest.fail("measured again"))
    assert Engine(tiny_pair).priced(EVEN) == first
    assert Engine(tiny_pair, EVEN).target_costs == {"draft": first.drafter.policy.target_cost}
