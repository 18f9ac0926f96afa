"""Trained heads: how well they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from dashboards import cells
from dashboards.figures.heads import heads_table, reliability_diagram
from dashboards.sections import Section
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.training.finished import Finished

FITS = {
    "head": cells.text("head"),
    "w_rej": cells.number("w_rej", "g"),
    "D": cells.number("depth", ".0f"),
    "train/KL": cells.number("train_kl", ".3f"),
    "eval/KL": cells.number("eval_kl", ".3f"),
    "test/KL": cells.number("test_kl", ".3f"),
    "AUC": cells.number("auc", ".3f"),
    "ECE": cells.number("ece", ".3f"),
    "epoch": lambda row: f"{row['epoch']:.0f} of {row['epochs']}",
}


def fits(heads: Sequence[Finished[HeadCard]]) -> Section:
    """How well the heads' probabilities fit, as in SpecDec++'s Table 3. The least eval KL of every
    kind and weight is marked."""
    frame = pd.DataFrame(
        {
            "test_kl": None,  # of cards of earlier versions
            **head.card.metrics,
            "head": head.label,
            "kind": head.card.kind,
            "w_rej": head.card.w_rej,
            "depth": head.card.depth if head.card.kind == "specdecpp" else None,
            "epochs": head.card.settings.epochs,
        }
        for head in heads
    )
    peers = frame.groupby(["kind", "w_rej"])["eval_kl"]
    least = (frame["eval_kl"] == peers.transform("min")) & (peers.transform("size") > 1)
    column = list(FITS).index("eval/KL")
    return Section(
        key="fits",
        shown=cells.table(frame, FITS),
        legend="KL in nats; eval: prompts on which epoch and rate were chosen; AUC, ECE on test",
        best=[(row, column) for row in frame.index[least]],
    )


def reliability(cards: Mapping[str, HeadCard]) -> Section:
    """How well calibrated some heads are, and how they fit."""
    return Section.drawn("heads", reliability_diagram(cards), heads_table(cards))
