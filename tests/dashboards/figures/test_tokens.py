"""Entropies and confidences of recorded tokens are drawn as they are."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from dashboards.figures.tokens import acceptance_by_confidence, entropy_by_outcome, entropy_table
from specdec_core.recordings.confidence_products import by_confidence


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
    figure = entropy_by_outcome({"small": tokens, "medium": tokens}, bins=10)
    bars = [t for t in figure.data if isinstance(t, go.Bar)]
    assert [t.name for t in bars] == ["accepted", "rejected"] * 2
    for bar in bars:
        assert sum(bar.y) == pytest.approx(1)
        count = sum(row[2] for row in bar.customdata)
        assert count == (4 if bar.name == "accepted" else 2)
        centre = float(np.dot(bar.x, bar.y))
        assert centre == pytest.approx(0.725 if bar.name == "accepted" else 2.0, abs=0.2)
    lines = [shape.x0 for shape in figure.layout.shapes]
    assert lines == pytest.approx([0.725, 2.0] * 2)
    assert "2.00 nats" in figure.layout.title.text
    assert "0.72" in figure.layout.title.text


def test_a_draft_that_is_always_right_is_drawn_without_rejections(tokens):
    figure = entropy_by_outcome({"twin": tokens.assign(accepted=True)})
    assert [t.name for t in figure.data] == ["accepted"]


def test_bins_of_confidence_hold_every_prefix_once():
    rng = np.random.default_rng(0)
    product = np.append(rng.uniform(0, 1, 4000), [0.0, 1.0])
    accepted = rng.uniform(0, 1, len(product)) < product
    table = by_confidence(pd.DataFrame({"product": product, "accepted": accepted}), 10)
    assert table["count"].sum() == len(product)
    assert np.allclose(table["high"] - table["low"], 0.1)
    assert ((table["low"] <= table["product"]) & (table["product"] <= table["high"])).all()
    # accepted with the probability of the product: the curve is the diagonal
    assert np.allclose(table["acceptance"], table["product"], atol=0.08)


def test_the_curve_and_the_counts_below_it_are_the_bins():
    frame = pd.DataFrame({"product": [0.02, 0.04, 0.97], "accepted": [False, True, True]})
    figure = acceptance_by_confidence({"small": frame}, bins=20)
    (curve,) = [t for t in figure.data if t.name == "small" and isinstance(t, go.Scatter)]
    (bars,) = [t for t in figure.data if isinstance(t, go.Bar)]
    assert list(curve.y) == [0.5, 1.0]
    assert list(curve.x) == pytest.approx([0.03, 0.97])
    assert list(bars.y) == [2, 1]
