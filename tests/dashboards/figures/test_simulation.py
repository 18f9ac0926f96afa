"""The simulation is drawn against the live engine: a point for every comparison."""

from __future__ import annotations

import pandas as pd

from dashboards.figures.simulation import simulated_against_live


def test_every_comparison_is_a_point() -> None:
    table = pd.DataFrame(
        {
            "configuration": ["a", "b", "b"],
            "load": ["1", "1", "2"],
            "tpot": [0.01, 0.02, None],
            "tpot_simulated": [0.011, 0.019, 0.03],
            "value": [100.0, 200.0, 300.0],
            "value_simulated": [90.0, 210.0, 310.0],
        }
    )
    measures = {"value": ("tokens/s", 1.0), "tpot": ("TPOT, ms", 1e3)}
    figure = simulated_against_live(table, measures, "load")
    assert [trace.name for trace in figure.data if trace.showlegend] == ["a", "b"]
    panels = {(trace.xaxis, trace.name): trace for trace in figure.data}
    assert len(panels) == len(figure.data) == 2 * 2
    assert list(panels["x", "b"].y) == [200, 300]
    assert list(panels["x", "b"].text) == ["1", "2"]
    assert (list(panels["x2", "b"].x), list(panels["x2", "b"].y)) == ([19.0], [20.0])
