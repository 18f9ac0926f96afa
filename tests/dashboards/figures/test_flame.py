"""Every function of a flame graph is below its caller, and as wide as what was seen of it."""

from __future__ import annotations

import pytest

from dashboards.figures.flame import draw_stacks

STACKS = {
    ("m:run", "specdec_core.engine.engine:Engine.step"): 1.0,
    ("m:run", "specdec_core.engine.engine:Engine.step", "torch.nn:Linear.forward"): 3.0,
    ("m:run", "specdec_core.engine.engine:Engine.step", "json:dumps"): 0.001,
}


def test_a_function_is_below_its_caller_and_as_wide_as_its_time() -> None:
    [icicle] = draw_stacks(STACKS).data
    assert icicle.labels == ("all", "run", "Engine.step", "Linear.forward")
    assert icicle.parents[1:] == icicle.ids[:3]
    assert icicle.parents[0] == ""
    assert icicle.values == pytest.approx((4.001, 4.001, 4.001, 3.0))
    assert len(set(icicle.ids)) == len(icicle.ids)
    assert len(set(icicle.marker.colors[2:])) == 2


def test_nothing_seen_is_an_empty_figure() -> None:
    assert draw_stacks({}).data[0].labels == ()
