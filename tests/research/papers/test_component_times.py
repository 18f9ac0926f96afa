"""The parts of decoding are told apart, and are parts of its time."""

import pytest

from research.papers.component_times import (
    CACHE,
    CONTROLLER,
    M_D,
    M_T,
    REST,
    ROLL_BACK,
    component_times,
)
from specdec_core.drafting.policies.pre_cut import PreCutSettings
from specdec_core.drafting.post_use.settings import PostUseSettings
from specdec_core.engine import Request

METHOD = PostUseSettings(policy=PreCutSettings(max_tokens=8, target_cost=4))


def test_components_are_counted_where_they_happen(tiny_pair):
    requests = [Request(str(i), (5, 9, 5, 9, 5), 40, ignore_eos=True) for i in range(2)]
    found, counts = component_times(tiny_pair, requests, METHOD)
    table = found.set_index("component")
    assert list(table.index) == [M_D, M_T, CACHE, ROLL_BACK, CONTROLLER, REST]
    assert table["share"].sum() == pytest.approx(1)
    assert (table["seconds"] > 0).all()
    assert table["calls"][M_D] == counts.n_draft
    assert table["calls"][M_T] == counts.n_target - counts.requests  # a first round has no draft
    assert table["calls"][REST] == table["calls"][M_T]
    assert table["calls"][ROLL_BACK] >= table["calls"][M_T]
    drafted, recycled, suffixes = table[["drafted", "recycled", "suffixes"]].iloc[0]
    assert drafted - recycled <= counts.n_draft
    assert recycled > 0
    assert 0 <= suffixes <= counts.n_accepted
