"""Table 3: every head with its fit, its best threshold and the latency that goes with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from dashboards.figures.heads import head_names, heads_frame, heads_heatmap, heads_table
from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.policies.specdecpp import SpecDecPlusPlusSettings
from specdec_core.search.results import SweepResult, Trial
from specdec_core.training.heads.evaluation import Modelled

THRESHOLDS = (0.3, 0.5, 0.7)


def card(depth: int, w_rej: float, **changes: object) -> HeadCard:
    values = {
        "kind": "specdecpp", "draft": "draft", "depth": depth, "width": 64, "hidden_size": 32,
        "top_k": 10, "w_acc": 1.0, "w_rej": w_rej, "pair": {}, "sampling": Sampling(),
        "metrics": {"train_kl": 0.1 + depth / 100, "eval_kl": 0.2 + w_rej / 10, "auc": 0.8},
    }  # fmt: skip
    return HeadCard(**(values | changes))


@pytest.fixture
def cards() -> dict[str, HeadCard]:
    return {f"d{d}-w{w:g}": card(d, w) for w in (6.0, 1.0) for d in (0, 3)}


@pytest.fixture
def result(swept: tuple[SweepResult, Path], cards: dict[str, HeadCard]) -> SweepResult:
    """A sweep in which d3-w6 is the fastest, with its middle threshold."""
    result = swept[0].model_copy(deep=True)
    for i, head in enumerate(cards):
        for threshold in THRESHOLDS:
            policy = SpecDecPlusPlusSettings(head=head, threshold=threshold)
            trial = result.trials[1].model_copy(deep=True)
            speedup = 1.1 + 0.1 * i - abs(threshold - 0.5) + (0.5 if head == "d3-w6" else 0)
            trial.metrics["estimated_speedup"] = speedup
            drafter = DraftModelSettings(draft="draft", policy=policy)
            result.trials.append(
                Trial(
                    configuration=Configuration(drafter=drafter),
                    counts=trial.counts,
                    metrics=trial.metrics,
                )
            )
    return result


def test_the_heads_of_a_sweep_are_those_its_configurations_name(result, cards):
    assert head_names(result) == list(cards)


def test_the_best_threshold_is_the_fastest_ones(result, cards):
    frame = heads_frame(cards, result).set_index("head")
    assert (frame["threshold"] == 0.5).all()
    assert frame.loc["d3-w6", "speedup"] == pytest.approx(1.7)
    seconds = result.profile.autoregressive_seconds(1) / 1.7
    assert frame.loc["d3-w6", "latency"] == pytest.approx(seconds)


def test_the_table_is_ordered_by_weight_and_depth_as_in_the_paper(result, cards):
    table = heads_table(heads_frame(cards, result))
    assert list(zip(table["w_rej"], table["D"], strict=True)) == [
        (1, "0"), (1, "3"), (6, "0"), (6, "3")
    ]  # fmt: skip
    assert table["train KL"].tolist() == pytest.approx([0.1, 0.13, 0.1, 0.13])
    assert table["eval KL"].tolist() == pytest.approx([0.3, 0.3, 0.8, 0.8])
    assert table["best h"].tolist() == [0.5] * 4


def test_a_head_is_shown_by_its_name_wherever_it_lies(cards):
    named = {"bundled:d0": cards["d0-w1"], "/somewhere/heads/d3": cards["d3-w1"]}
    assert list(heads_table(heads_frame(named))["head"]) == ["d0", "d3"]


def test_heads_that_were_judged_on_a_recording_need_no_sweep(cards):
    policy = SpecDecPlusPlusSettings(head="d3-w1", threshold=0.55)
    judged = {"d3-w1": Modelled(policy=policy, speedup=2.5, latency=0.002, mat=4.0)}
    table = heads_table(heads_frame(cards, judged=judged)).set_index("head")
    assert table.loc["d3-w1", ["best h", "ms a token", "speedup"]].tolist() == [0.55, 2.0, 2.5]
    assert table.drop(index="d3-w1")["speedup"].isna().all()
    figure = heads_heatmap(heads_frame(cards, judged=judged))
    assert "2.50× with h = 0.55" in figure.layout.title.text


def test_without_a_sweep_the_table_has_the_fit_alone(cards):
    table = heads_table(heads_frame(cards))
    assert "best h" not in table
    assert "ms a token" not in table
    assert {"train KL", "eval KL"} <= set(table.columns)


def test_the_heat_map_has_a_cell_for_each_head_and_names_the_best(result, cards):
    frame = heads_frame(cards, result)
    (heat,) = heads_heatmap(frame).data
    assert list(heat.x) == ["0", "3"]
    assert list(heat.y) == ["1", "6"]
    expected = 1e3 * frame.set_index(["w_rej", "depth"])["latency"]
    assert np.allclose(heat.z, [[expected[w, d] for d in (0, 3)] for w in (1, 6)])
    assert "h=0.5" in heat.text[1][1]
    assert "w_rej = 6 and D = 3: 1.70× with h = 0.5" in heads_heatmap(frame).layout.title.text


def test_without_latencies_the_heat_map_shows_the_evaluation_kl(cards):
    figure = heads_heatmap(heads_frame(cards))
    assert np.allclose(figure.data[0].z, [[0.3, 0.3], [0.8, 0.8]])
    assert "evaluation KL 0.300" in figure.layout.title.text


def test_a_grid_with_holes_and_other_kinds_is_drawn(cards):
    del cards["d0-w6"]
    cards["t1"] = card(0, 1.0, kind="t1")
    cards["other"] = card(0, 1.0, draft="other")
    frame = heads_frame(cards)
    figure = heads_heatmap(frame)
    assert isinstance(figure, go.Figure)
    assert len(figure.data) == 2  # a panel for each draft
    assert np.isnan(figure.data[0].z[1][0])
    assert set(heads_table(frame)["head"]) == set(cards)
