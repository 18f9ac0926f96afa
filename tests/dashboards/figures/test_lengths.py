"""Draft lengths are held against the oracle's, and utilisation adds up over requests."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from dashboards import look
from dashboards.figures.lengths import FARTHEST, length_errors, utilisation, utilisation_over_time


def rounds(label: str, family: str, drafted: list[int], oracle: list[int]) -> pd.DataFrame:
    return pd.DataFrame({"label": label, "family": family, "drafted": drafted, "oracle": oracle})


def test_the_histogram_is_the_share_of_rounds_at_each_distance():
    figure = length_errors(
        pd.concat([
            rounds("svip 0.8", "svip", [3, 2, 5, 20], [3, 3, 3, 2]),
            rounds("fixed K=5", "fixed", [5, 5], [2, 40]),
        ])
    )  # fmt: skip
    bars = {t.name: dict(zip(t.x, t.y, strict=True)) for t in figure.data}
    assert bars["svip 0.8"] == {-1: 0.25, 0: 0.25, 2: 0.25, FARTHEST: 0.25}
    assert bars["fixed K=5"] == {-FARTHEST: 0.5, 3: 0.5}
    colours = {t.name: t.marker.color for t in figure.data}
    assert colours["svip 0.8"] == look.style("svip").colour
    notes = " ".join(note.text for note in figure.layout.annotations)
    # means are of the distances themselves, wherever the bars end
    assert "svip 0.8</b>   mean +4.8, off by 5.2, exact in 25%" in notes
    assert "svip 0.8 comes closest" in figure.layout.title.text
    assert "off by 5.2 tokens" in figure.layout.title.text


def test_a_row_each_in_the_order_of_the_families():
    frame = pd.concat([
        rounds("svip 0.8", "svip", [1], [1]),
        rounds("fixed K=5", "fixed", [1], [1]),
        rounds("oracle", "oracle", [1], [1]),
    ])  # fmt: skip
    figure = length_errors(frame)
    assert [t.name for t in figure.data] == ["fixed K=5", "svip 0.8", "oracle"]
    assert len({t.yaxis for t in figure.data}) == 3
    assert [note.yref for note in figure.layout.annotations] == [
        "y domain", "y2 domain", "y3 domain"
    ]  # fmt: skip


def test_no_rounds_are_an_empty_figure():
    figure = length_errors(rounds("", "", [], []))
    assert isinstance(figure, go.Figure)


@pytest.fixture
def decoded() -> pd.DataFrame:
    """Three requests of two rounds."""
    return pd.DataFrame({
        "request_id": ["b", "b", "a", "a", "c", "c"],
        "generated": [2, 2, 6, 6, 1, 1],
        "draft_forwards": [4, 4, 6, 6, 1, 0],
    })  # fmt: skip


def test_utilisation_is_a_ratio_of_sums_in_the_order_of_the_requests(decoded):
    table = utilisation(decoded, window=2)
    assert table["so far"].tolist() == pytest.approx([4 / 8, 16 / 20, 18 / 21])
    assert table["recent"].tolist() == pytest.approx([4 / 8, 16 / 20, 14 / 13])


def test_a_request_without_a_draft_call_does_not_divide_by_zero():
    table = utilisation(
        pd.DataFrame({"request_id": [0], "generated": [1], "draft_forwards": [0]}), window=1
    )
    assert np.isfinite(table.to_numpy()).all()


def test_runs_of_one_family_are_told_apart_by_their_lines(decoded):
    names = ["fixed K=5", "pre-cut, Q_init", "pre-cut, Q updated"]
    families = {names[0]: "fixed", names[1]: "pre_cut", names[2]: "pre_cut"}
    figure = utilisation_over_time(dict.fromkeys(names, decoded), families)
    lines = [t for t in figure.data if t.showlegend]
    assert [t.name for t in lines] == names
    assert len({(t.line.color, t.line.dash) for t in lines}) == 3
    assert all(list(t.x) == [1, 2, 3] for t in lines)
    assert lines[0].y[-1] == pytest.approx(18 / 21)
    assert "0.86 with pre-cut, Q updated" in figure.layout.title.text
