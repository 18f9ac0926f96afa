"""Table 3: every head with its fit, its best threshold and the latency that goes with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dashboards.figures.heads import head_names, heads_table, reliability_diagram
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
            configuration = Configuration(drafter=DraftModelSettings(draft="draft", policy=policy))
            result.trials.append(
                Trial(configuration=configuration, counts=trial.counts, metrics=trial.metrics)
            )
    return result


def test_the_table_has_each_head_with_the_threshold_that_is_fastest(result, cards):
    assert head_names(result) == list(cards)
    table = heads_table(cards, result)
    assert list(zip(table["w_rej"], table["D"], strict=True)) == [
        (1, "0"), (1, "3"), (6, "0"), (6, "3")
    ]  # fmt: skip
    assert table["train KL"].tolist() == pytest.approx([0.1, 0.13, 0.1, 0.13])
    assert table["eval KL"].tolist() == pytest.approx([0.3, 0.3, 0.8, 0.8])
    assert table["best h"].tolist() == [0.5] * 4
    fastest = table.set_index("head").loc["d3-w6"]
    assert fastest["speedup"] == pytest.approx(1.7)
    assert fastest["ms a token"] == pytest.approx(
        1e3 * result.profile.autoregressive_seconds(1) / 1.7
    )


def test_heads_that_were_judged_on_a_recording_need_no_sweep(cards):
    policy = SpecDecPlusPlusSettings(head="d3-w1", threshold=0.55)
    judged = {"d3-w1": Modelled(policy=policy, speedup=2.5, latency=0.002, mat=4.0)}
    table = heads_table(cards, judged=judged).set_index("head")
    assert table.loc["d3-w1", ["best h", "ms a token", "speedup"]].tolist() == [0.55, 2.0, 2.5]
    assert table.drop(index="d3-w1")["speedup"].isna().all()


def test_without_a_sweep_the_table_has_the_fit_of_every_kind_by_its_short_name(cards):
    named = {"bundled:d0": cards["d0-w1"], "/somewhere/heads/t1": card(0, 1.0, kind="t1")}
    table = heads_table(named)
    assert list(table["head"]) == ["d0", "t1"]
    assert list(table["D"]) == ["0", "–"]
    assert {"train KL", "eval KL"} <= set(table.columns)
    assert not {"best h", "ms a token", "ECE"} & set(table.columns)


def test_of_many_heads_the_first_are_drawn_and_the_others_wait_in_the_legend(cards):
    many = {f"head {i}": cards["d0-w1"] for i in range(8)}
    lines = reliability_diagram(many).data[1:]
    assert [line.visible for line in lines] == [True] * 6 + ["legendonly"] * 2
