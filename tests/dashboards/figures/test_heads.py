"""Table 3: every head with its fit."""

from __future__ import annotations

import pytest

from dashboards.figures.heads import heads_table, reliability_diagram
from specdec_core.config import Sampling
from specdec_core.drafting.heads.card import HeadCard


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


def test_the_table_has_each_head(cards):
    table = heads_table(cards)
    assert list(zip(table["w_rej"], table["D"], strict=True)) == [
        (1, "0"), (1, "3"), (6, "0"), (6, "3")
    ]  # fmt: skip
    assert table["train KL"].tolist() == pytest.approx([0.1, 0.13, 0.1, 0.13])
    assert table["eval KL"].tolist() == pytest.approx([0.3, 0.3, 0.8, 0.8])


def test_the_table_has_the_fit_of_every_kind_by_its_short_name(cards):
    named = {"bundled:d0": cards["d0-w1"], "/somewhere/heads/t1": card(0, 1.0, kind="t1")}
    table = heads_table(named)
    assert list(table["head"]) == ["d0", "t1"]
    assert list(table["D"]) == ["0", "–"]
    assert {"train KL", "eval KL"} <= set(table.columns)
    assert "ECE" not in table.columns


def test_of_many_heads_the_first_are_drawn_and_the_others_wait_in_the_legend(cards):
    many = {f"head {i}": cards["d0-w1"] for i in range(8)}
    lines = reliability_diagram(many).data[1:]
    assert [line.visible for line in lines] == [True] * 6 + ["legendonly"] * 2
