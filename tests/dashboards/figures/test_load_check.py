"""The simulation is drawn against the live engine: a point for every comparison."""

from __future__ import annotations

import pandas as pd

from dashboards.figures.load_check import agreement_figure


def test_every_comparison_is_a_point() -> None:
    both = {
        "configuration": ["a", "b"],
        **{"tokens_per_second": [100.0, 200.0], "tokens_per_second_simulated": [90.0, 210.0]},
        **{"tpot": [0.01, 0.02], "tpot_simulated": [0.011, 0.019]},
    }
    clients = pd.DataFrame(both | {"clients": 4, "ttft": 0.1, "ttft_simulated": 0.2})
    rates = pd.DataFrame(
        both | {"share": 0.5, "rate": 3.21, "ttft_p95": 0.3, "ttft_p95_simulated": 0.4}
    )
    figure = agreement_figure(clients, rates)
    assert len(figure.data) == 3 * 2 * 2
    assert [trace.name for trace in figure.data if trace.showlegend] == ["a", "b"]
    by_panel = {(trace.xaxis, trace.marker.symbol, trace.name): trace for trace in figure.data}
    at_a_rate = by_panel["x3", "diamond", "b"]
    assert (list(at_a_rate.x), list(at_a_rate.y)) == ([300.0], [400.0])
    assert list(at_a_rate.text) == ["50%, 3.21/s"]
    assert list(by_panel["x", "circle", "a"].y) == [90.0]
