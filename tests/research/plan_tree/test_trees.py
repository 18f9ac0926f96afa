"""The heat map of tree configurations shows what was replayed."""

from __future__ import annotations

import numpy as np
import pandas as pd

from research.plan_tree.trees import tree_heatmap


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
