"""The heat map of tree configurations shows what was replayed."""

from __future__ import annotations

import numpy as np
import pandas as pd

from research.plan_tree.trees import MOST_COLUMNS, MOST_ROWS, tree_heatmap
from specdec_core.search.space import k_configurations


def test_a_cell_is_the_speed_of_its_configuration():
    speed = {(4, 2, 2, 1): 3.0, (4, 2, 1): 2.5, (4, 2): 1.5, (2, 1, 1): 2.0}
    frame = pd.DataFrame({
        "draft": "medium", "branching": list(speed), "nodes": [44, 20, 12, 6], "mat": 2.0,
        "speedup": list(speed.values()),
    })  # fmt: skip
    figure = tree_heatmap(frame)
    (heat,) = figure.data
    assert list(heat.y) == ["2·1", "4·2"]
    assert list(heat.x) == ["–", "1", "2·1"]
    cells = dict(np.ndenumerate(np.asarray(heat.z, dtype=float)))
    assert cells[1, 2] == speed[4, 2, 2, 1]
    assert cells[1, 0] == speed[4, 2]
    assert cells[0, 1] == speed[2, 1, 1]
    assert np.isnan(cells[0, 2])
    assert "44 nodes" in heat.customdata[1][2]
    assert "4·2·2·1" in figure.layout.title.text


def test_of_many_shapes_the_fastest_rows_and_columns_are_drawn():
    shapes = list(k_configurations(40, 5))
    frame = pd.DataFrame({
        "draft": "small", "branching": shapes, "nodes": 1, "mat": 1.0,
        "speedup": np.linspace(1, 2, len(shapes)),
    })  # fmt: skip
    (heat,) = tree_heatmap(frame).data
    assert np.shape(heat.z)[0] <= MOST_ROWS
    assert np.shape(heat.z)[1] <= MOST_COLUMNS
    assert np.nanmax(np.asarray(heat.z, dtype=float)) == 2


def test_every_draft_has_a_panel_on_one_scale():
    shapes = {"draft": ["small", "medium"], "branching": [(2, 1), (3, 1)], "speedup": [1.1, 1.2]}
    figure = tree_heatmap(pd.DataFrame({**shapes, "nodes": 4, "mat": 1.9}))
    assert {heat.name for heat in figure.data} == {"small", "medium"}
    assert {heat.coloraxis for heat in figure.data} == {"coloraxis"}
