"""Draft lengths are held against the oracle's."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from dashboards import look
from dashboards.figures.lengths import FARTHEST, length_errors


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
