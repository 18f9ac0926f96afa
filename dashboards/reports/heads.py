"""Trained heads: how well they fit, and the best threshold of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from dashboards import cells, figures
from dashboards.figures.head_training import reliability_diagram, training_curves
from dashboards.sections import Section
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.search.results import SweepResult
from specdec_core.training.heads.evaluation import Modelled
from specdec_core.training.heads.finished import Finished

FITS = {
    "head": cells.text("head"),
    "w_rej": cells.number("w_rej", "g"),
    "D": cells.number("depth", ".0f"),
    "train/KL": cells.number("train_kl", ".3f"),
    "eval/KL": cells.number("eval_kl", ".3f"),
    "AUC": cells.number("auc", ".3f"),
    "ECE": cells.number("ece", ".3f"),
    "epoch": lambda row: f"{row['epoch']:.0f} of {row['epochs']}",
}
THRESHOLDS = {
    "": cells.text("name"),
    "best": cells.text("chosen"),
    "AUC": cells.number("auc", ".3f"),
    "MAT": cells.number("mat", ".2f"),
    "ms a token": cells.number("ms", ".3f"),
    "modelled speedup": cells.number("speedup", ".3f×"),
}


def fits(heads: Sequence[Finished]) -> Section:
    """How well the heads' probabilities fit, as in SpecDec++'s Table 3. The least eval KL of every
    kind and weight is marked."""
    frame = pd.DataFrame(
        {
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
        legend="KL in nats, on held-out prompts where not train",
        best=[(row, column) for row in frame.index[least]],
    )


def thresholds(judged: Mapping[str, Modelled]) -> Section:
    """The best threshold of each rule and head on a recording; the fastest is marked."""
    frame = pd.DataFrame(
        {
            "name": name,
            "chosen": _chosen(modelled.policy),
            "auc": modelled.auc,
            "mat": modelled.mat,
            "ms": 1e3 * modelled.latency,
            "speedup": modelled.speedup,
        }
        for name, modelled in judged.items()
    )
    return Section(
        key="thresholds",
        shown=cells.table(frame, THRESHOLDS),
        legend="by replay and the profile; AUC: accepted against rejected candidates",
        marked=list(frame.index[frame["speedup"] == frame["speedup"].max()]),
    )


def _chosen(policy: Any) -> str:
    if isinstance(policy, FixedSettings):
        return f"K = {policy.max_tokens}"
    return f"{'Π ' if getattr(policy, 'cumulative', False) else ''}h = {policy.threshold:g}"


def drawn(
    cards: Mapping[str, HeadCard], judged: Mapping[str, Modelled] | None = None
) -> list[Section]:
    """The figures of some heads; `judged` has their best thresholds."""
    return [
        Section.drawn("reliability", reliability_diagram(cards)),
        Section.drawn("curves", training_curves(cards)),
        *ablation(cards, judged=judged),
    ]


def ablation(
    cards: Mapping[str, HeadCard],
    result: SweepResult | None = None,
    judged: Mapping[str, Modelled] | None = None,
) -> list[Section]:
    """Table 3 of SpecDec++ for trained heads; with the best thresholds where a sweep used them or
    they were judged on a recording (:func:`specdec_core.training.heads.evaluation.evaluate`)."""
    if not any(card.kind == "specdecpp" for card in cards.values()):
        return []
    frame = figures.heads_frame(cards, result, judged)
    return [Section.drawn("heads", figures.heads_heatmap(frame), figures.heads_table(frame))]
