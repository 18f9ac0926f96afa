"""The heat map of tree configurations shows what was replayed."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dashboards.figures.trees import (
    MOST_COLUMNS,
    MOST_ROWS,
    tree_heatmap,
    trees_frame,
)
from specdec_core.config import Configuration, PairSpec
from specdec_core.cost import Hardware
from specdec_core.drafting.tree.settings import TreeSettings
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.search.results import SweepResult, Trial
from specdec_core.search.space import k_configurations
from specdec_core.tokens.statistics import Counts

PROFILE = Hardware(name="made up", target=0.01, drafts={"*": 0.001}).profile(["small", "medium"])


def trial(branching: tuple, accepted: int, draft: str | None = None) -> Trial:
    drafter = TreeSettings(draft=draft, branching=branching)
    counts = Counts(
        requests=1, n=100 + accepted, n_draft=100 * drafter.depth, n_target=100,
        n_discarded=100 * drafter.nodes - accepted, n_drafted=100 * drafter.nodes,
        n_accepted=accepted, n_target_tokens=100,
    )  # fmt: skip
    return Trial.of(Configuration(drafter=drafter), counts, PROFILE, 64)


def sweep(*trials: Trial) -> SweepResult:
    return SweepResult(
        name="trees", started="2026-11-21T09:00:00Z", max_new_tokens=64, profile=PROFILE,
        pair=PairSpec(), prompts=PromptSet(source="s", count=1, digest="0"), trials=list(trials),
    )  # fmt: skip


def test_a_cell_is_the_speed_of_its_configuration():
    shapes = {(4, 2, 2, 1): 300, (4, 2, 1): 250, (4, 2): 150, (2, 1, 1): 200}
    trials = [trial(shape, accepted) for shape, accepted in shapes.items()]
    uneven = trial((2, (2, 1)), 170)
    frame = trees_frame(sweep(*trials, uneven))
    assert set(frame["branching"]) == set(shapes)  # an uneven tree has no cell
    assert set(frame["draft"]) == {"medium"}  # the pair's first
    figure = tree_heatmap(frame)
    (heat,) = figure.data
    assert list(heat.y) == ["2·1", "4·2"]
    assert list(heat.x) == ["–", "1", "2·1"]
    speed = {t.configuration.drafter.branching: t.metrics["estimated_speedup"] for t in trials}
    cells = dict(np.ndenumerate(np.asarray(heat.z, dtype=float)))
    assert cells[1, 2] == speed[4, 2, 2, 1]
    assert cells[1, 0] == speed[4, 2]
    assert cells[0, 1] == speed[2, 1, 1]
    assert np.isnan(cells[0, 2])
    assert "44 nodes" in heat.customdata[1][2]
    best = max(speed, key=speed.get)
    assert "·".join(map(str, best)) in figure.layout.title.text


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
    frame = trees_frame(sweep(trial((2, 1), 90, "small"), trial((3, 1), 95, "medium")))
    figure = tree_heatmap(frame)
    assert {heat.name for heat in figure.data} == {"small", "medium"}
    assert {heat.coloraxis for heat in figure.data} == {"coloraxis"}
