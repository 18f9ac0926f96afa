"""The planner's figures show what was replayed."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from research.plan_tree.comparison import KINDS, TreeComparison
from research.plan_tree.figures import acceptance_by_rank, trees_by_budget


@pytest.fixture
def comparison() -> TreeComparison:
    rows = [
        {
            "kind": kind, "budget": budget, "shape": f"{kind} {budget}", "nodes": budget,
            "depth": 2, "expected": 2.0, "mat": 1.9, "branching": (budget, 1),
            "speedup": 1 + 0.1 * budget + 0.01 * place,
        }
        for budget in (2, 4)
        for place, kind in enumerate(KINDS)
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    return TreeComparison("small", np.array([0.6, 0.2, 0.1, 0.05, 0.01]), frame, frame, rows[-1])


def test_planned_trees_are_drawn_beside_what_was_tried(comparison):
    figure = trees_by_budget(comparison)
    lines = {line.name: list(line.y) for line in figure.data}
    assert len(lines) == len(KINDS)
    assert lines["best chain"] == pytest.approx([1.2, 1.4])
    assert lines["planned tree of any shape"] == pytest.approx([1.23, 1.43])
    ratio = 1.43 / 1.41 - 1
    assert f"{ratio:.1%} faster" in figure.layout.title.text


def test_ranks_add_up(comparison):
    figure = acceptance_by_rank(comparison)
    bars, line = figure.data
    assert list(bars.x) == [1, 2, 3, 4, 5]
    assert list(line.y) == pytest.approx([0.6, 0.8, 0.9, 0.95, 0.96])
    assert "60%" in figure.layout.title.text
    assert "95%" in figure.layout.title.text
