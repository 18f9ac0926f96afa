"""Trained heads: how well they fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from dashboards import cells
from dashboards.figures.heads import reliability_diagram
from dashboards.sections import Section
from specdec_core.config.policies import head_name
from specdec_core.drafting.heads.card import HeadCard

METRICS = ("train_kl", "eval_kl", "test_kl", "auc", "ece", "epoch")
FITS = {
    "head": cells.text("head"),
    "w_rej": cells.number("w_rej", "g"),
    "D": cells.number("depth", ".0f"),
    "train/KL": cells.number("train_kl", ".3f"),
    "eval/KL": cells.number("eval_kl", ".3f"),
    "test/KL": cells.number("test_kl", ".3f"),
    "AUC": cells.number("auc", ".3f"),
    "ECE": cells.number("ece", ".3f"),
    "epoch": cells.number("epoch", ".0f"),
}


def fits(cards: Mapping[str, HeadCard]) -> Section:
    """How well the heads' probabilities fit, as in SpecDec++'s Table 3. The least eval KL of every
    kind and weight is marked."""
    frame = pd.DataFrame(
        {
            "head": head_name(name),
            "draft": card.draft,
            "kind": card.kind,
            "w_rej": card.w_rej / card.w_acc,
            "depth": card.depth if card.kind == "specdecpp" else None,
            **{key: card.metrics.get(key) for key in METRICS},
        }
        for name, card in cards.items()
    ).sort_values(["draft", "kind", "w_rej", "depth"], kind="stable", ignore_index=True)
    peers = frame.astype({"eval_kl": float}).groupby(["kind", "w_rej"])["eval_kl"]
    least = (frame["eval_kl"] == peers.transform("min")) & (peers.transform("size") > 1)
    column = list(FITS).index("eval/KL")
    return Section(
        key="fits",
        frame=frame,
        shown=cells.table(frame, FITS),
        legend="KL in nats; eval: prompts on which epoch and rate were chosen; AUC, ECE on test",
        best=[(row, column) for row in frame.index[least]],
    )


def reliability(cards: Mapping[str, HeadCard]) -> Section:
    """How well calibrated some heads are, and how they fit."""
    table, drawn = fits(cards), Section.drawn("heads", reliability_diagram(cards))
    return replace(drawn, frame=table.frame, shown=table.shown, legend=table.legend)
