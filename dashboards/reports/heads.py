"""Trained heads: how well they fit, and the best threshold of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dashboards import cells
from dashboards.figures.heads import heads_table, reliability_diagram
from dashboards.sections import Section
from specdec_core.drafting.heads.card import HeadCard
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.measure.comparison import UNKNOWN, ratio_columns
from specdec_core.tokens.statistics import Ratio, paired_ratio
from specdec_core.training.heads.evaluation import PRODUCT, Modelled
from specdec_core.training.heads.finished import FinishedHead

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
THRESHOLDS = {
    "": cells.text("name"),
    "best": cells.text("chosen"),
    "AUC": cells.number("auc", ".3f"),
    "MAT": cells.number("mat", ".2f"),
    "ms a token": cells.number("ms", ".3f"),
    "modelled speedup": cells.number("speedup", ".3f×"),
    "over the product": cells.ratio("over", "over_low", "over_high"),
}


def fits(heads: Sequence[FinishedHead]) -> Section:
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


def thresholds(judged: Mapping[str, Modelled]) -> Section:
    """Each rule and head with its threshold, held against the confidence product on the same
    prompts; the fastest is marked."""
    product = judged.get(PRODUCT)
    frame = pd.DataFrame(
        {
            "name": name,
            "chosen": _chosen(modelled.policy),
            "auc": modelled.auc,
            "mat": modelled.mat,
            "ms": 1e3 * modelled.latency,
            "speedup": modelled.speedup,
            **ratio_columns("over", _over(modelled, product)),
        }
        for name, modelled in judged.items()
    )
    return Section(
        key="thresholds",
        frame=frame,
        shown=cells.table(frame, THRESHOLDS),
        legend="by replay and the profile; chosen on half the prompts, reported on the others; AUC:"
        " accepted against rejected candidates; the ratio's 95 % interval is over prompts",
        marked=list(frame.index[frame["speedup"] == frame["speedup"].max()]),
    )


def _over(modelled: Modelled, other: Modelled | None) -> Ratio:
    """How many times faster than `other`, by a bootstrap over prompts."""
    if other is None or not modelled.seconds:
        return UNKNOWN
    return paired_ratio(np.array(other.seconds), np.array(modelled.seconds))


def _chosen(policy: Any) -> str:
    if isinstance(policy, FixedSettings):
        return f"K = {policy.max_tokens}"
    return f"{'Π ' if getattr(policy, 'cumulative', False) else ''}h = {policy.threshold:g}"


def reliability(cards: Mapping[str, HeadCard]) -> Section:
    """How well calibrated some heads are, and how they fit."""
    return Section.drawn("heads", reliability_diagram(cards), heads_table(cards))
