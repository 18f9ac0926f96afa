"""Entropies of recorded tokens are drawn unchanged."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from dashboards.figures.tokens import entropy_by_outcome, entropy_table


@pytest.fixture
def tokens() -> pd.DataFrame:
    entropy = [0.1, 0.3, 0.5, 1.0, 2.0, 3.0]
    return pd.DataFrame({"entropy": entropy, "accepted": [True, True, True, False, True, False]})


def test_the_table_has_the_means_and_how_well_entropy_ranks(tokens):
    row = entropy_table({"small": tokens}).iloc[0]
    assert row["draft"] == "small"
    assert row["accepted"] == pytest.approx((0.1 + 0.3 + 0.5 + 2.0) / 4)
    assert row["rejected"] == pytest.approx(2.0)
    assert row["accepted share"] == pytest.approx(4 / 6)
    assert row["AUC"] == pytest.approx(7 / 8)  # only 2.0 lies above the rejected 1.0


def test_each_distribution_sums_to_one_and_its_mean_is_marked(tokens):
    figure = entropy_by_outcome({"small": tokens, "medium": tokens})
    bars = [t for t in figure.data if isinstance(t, go.Bar)]
    assert [t.name for t in bars] == ["accepted", "rejected"] * 2
    for bar in bars:
        assert sum(bar.y) == pytest.approx(1)
        assert sum(bar.customdata) == (4 if bar.name == "accepted" else 2)
        centre = float(np.dot(bar.x, bar.y))
        assert centre == pytest.approx(0.725 if bar.name == "accepted" else 2.0, abs=0.2)
    lines = [shape.x0 for shape in figure.layout.shapes]
    assert lines == pytest.approx([0.725, 2.0] * 2)
    assert "2.00 nats" in figure.layout.title.text
    assert "0.72" in figure.layout.title.text


def test_a_draft_that_is_always_right_is_drawn_without_rejections(tokens):
    figure = entropy_by_outcome({"twin": tokens.assign(accepted=True)})
    assert [t.name for t in figure.data] == ["accepted"]
