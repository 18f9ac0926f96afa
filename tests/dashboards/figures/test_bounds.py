"""The bounds that are drawn lie below the acceptance probability that is drawn."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dashboards.figures.bounds import TRUTH, acceptance_bounds, ratio_of_entropies


@pytest.fixture(scope="module")
def tokens() -> pd.DataFrame:
    """Pairs of distributions over 12 tokens, some alike and some not."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3000, 12)) * rng.uniform(0.2, 5, (3000, 1))
    other = logits + rng.normal(size=logits.shape) * rng.uniform(0.05, 1.5, (3000, 1))
    q, p = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (logits, other))
    return pd.DataFrame({
        "entropy": -(q * np.log(q)).sum(1),
        "cross_entropy": -(q * np.log(p)).sum(1),
        "overlap": np.minimum(p, q).sum(1),
    })  # fmt: skip


def lines(figure) -> dict[str, np.ndarray]:
    return {t.name: np.array(t.y) for t in figure.data if "lines" in t.mode}


def test_mean_bounds_lie_below_the_mean_acceptance(tokens):
    drawn = lines(acceptance_bounds(tokens, "small"))
    truth = drawn[TRUTH]
    assert (drawn["Pinsker, true H(q, p)"] <= truth).all()
    assert (drawn["Bretagnolle–Huber"] <= truth).all()
    order = np.argsort(tokens["entropy"].to_numpy(), kind="stable")
    first = tokens["overlap"].to_numpy()[np.array_split(order, 24)[0]].mean()
    assert truth[0] == pytest.approx(first)


def test_the_title_says_how_often_the_draft_only_bound_holds(tokens):
    for c in (0.01, 0.18, 2.0):
        figure = acceptance_bounds(tokens, "small", c)
        bound = np.maximum(1 - np.sqrt(c * tokens["entropy"]), 0)
        share = float((bound <= tokens["overlap"]).mean())
        assert f"at {share:.0%} of small" in figure.layout.title.text
        curve = next(t for t in figure.data if t.name.startswith("draft alone"))
        assert curve.y[-1] == pytest.approx(max(1 - np.sqrt(c * curve.x[-1]), 0))


def test_points_are_thinned_the_same_way_every_time(tokens):
    one, other = (acceptance_bounds(tokens, "small", most=200) for _ in range(2))
    (points,) = [t for t in one.data if t.mode == "markers"]
    assert len(points.x) == 200
    assert one.data == other.data


def test_the_ratio_is_drawn_as_it_is_distributed_and_as_it_was_fitted(tokens):
    c = 0.18
    figure = ratio_of_entropies(tokens, "small", c)
    bars, fitted = figure.data
    gamma = (tokens["cross_entropy"] / tokens["entropy"]).to_numpy()
    edge = bars.x[-1] + bars.width / 2
    assert sum(bars.y) == pytest.approx(np.mean(gamma <= edge), abs=1e-3)
    assert f"at {np.mean(gamma <= 2 * c + 1):.0%} of small" in figure.layout.title.text
    assert 0.9 < sum(fitted.y) <= 1
    assert figure.layout.shapes[0].x0 == pytest.approx(2 * c + 1)


def test_a_draft_without_entropy_has_no_ratio(tokens):
    with pytest.raises(ValueError, match="too few"):
        ratio_of_entropies(tokens.assign(entropy=0.0), "small")
