"""Trained acceptance heads: how well they fit, and how fast decoding is with the best threshold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import base_figure, scaled
from dashboards.ranking import draft_of, policy_of
from specdec_core.config import PolicySettings
from specdec_core.search.results import SweepResult

if TYPE_CHECKING:
    from specdec_core.drafting.heads.card import HeadCard
    from specdec_core.training.heads.evaluation import Modelled

# from slow to fast, readable with dark and with light text on it
FAST_TO_SLOW = [[0.0, "#2c5fae"], [0.5, "#8fb4dd"], [1.0, "#f0ece4"]]


def head_names(result: SweepResult) -> list[str]:
    """The heads that a sweep's configurations read, in order of appearance."""
    heads = (head for trial in result.trials for _, head in trial.configuration.heads)
    return list(dict.fromkeys(heads))


def heads_frame(
    cards: Mapping[str, HeadCard],
    result: SweepResult | None = None,
    judged: Mapping[str, Modelled] | None = None,
) -> pd.DataFrame:
    """One row a head: what it is, how it fits, and its best threshold and modelled latency: from
    `judged` (:func:`specdec_core.training.heads.evaluation.evaluate`), else from the
    configurations of `result` that read it.

    Columns head, kind, draft, w_rej, depth, train_kl, eval_kl (nats; of another loss for other
    kinds), auc, threshold, latency (s a token), speedup; NaN where unknown.
    """
    rows = []
    for name, card in cards.items():
        row = {
            "head": name,
            "kind": card.kind,
            "draft": card.draft,
            "w_rej": card.w_rej / card.w_acc,
            "depth": card.depth,
            **{key: card.metrics.get(key, np.nan) for key in ("train_kl", "eval_kl", "auc")},
        }
        modelled = (judged or {}).get(name)
        if modelled is None:
            best = _fastest(name, card.draft, result)
        else:
            best = {
                "threshold": _threshold(modelled.policy),
                "latency": modelled.latency,
                "speedup": modelled.speedup,
            }
        rows.append(row | best)
    frame = pd.DataFrame(rows)
    return frame.sort_values(["draft", "kind", "w_rej", "depth"], ignore_index=True)


def _fastest(head: str, draft: str, result: SweepResult | None) -> dict[str, float]:
    """Threshold, latency and speedup of the fastest configuration with `head`, as modelled."""
    best = {"threshold": np.nan, "latency": np.nan, "speedup": np.nan}
    if result is None:
        return best
    for trial in result.trials:
        policy = policy_of(trial)
        speedup = trial.metrics.get("estimated_speedup", np.nan)
        if policy is None or head not in policy.heads or draft_of(result, trial) != draft:
            continue
        if not speedup <= best["speedup"]:  # NaN is slower than anything
            seconds = result.profile.autoregressive_seconds(1) / speedup
            best = {"threshold": _threshold(policy), "latency": seconds, "speedup": speedup}
    return best


def _threshold(policy: PolicySettings) -> float:
    """Every policy that reads a head has one."""
    return float(getattr(policy, "threshold", np.nan))


def short(head: str) -> str:
    """A head's name without its folders."""
    return Path(head).name.removeprefix("bundled:")


def heads_table(frame: pd.DataFrame) -> pd.DataFrame:
    """SpecDec++'s Table 3 from :func:`heads_frame`: w_rej × D × KL × best h and its latency."""
    columns = {
        "head": "head",
        "draft": "draft",
        "w_rej": "w_rej",
        "depth": "D",
        "train_kl": "train KL",
        "eval_kl": "eval KL",
        "auc": "AUC",
        "threshold": "best h",
        "latency": "ms a token",
        "speedup": "speedup",
    }
    table = frame[list(columns)].copy()
    table["head"] = [short(name) for name in frame["head"]]
    table["latency"] *= 1e3
    table["depth"] = [
        f"{d}" if kind == "specdecpp" else "–"
        for d, kind in zip(frame["depth"], frame["kind"], strict=True)
    ]
    known = table.columns[~table.isna().all()]
    return table[known].rename(columns=columns)


def heads_heatmap(frame: pd.DataFrame) -> go.Figure:
    """Modelled latency of the best threshold over D × w_rej (SpecDec++, Table 3), a panel for each
    draft; the evaluation KL where no latency is known. Takes :func:`heads_frame`."""
    grid = frame[frame["kind"] == "specdecpp"]
    timed = bool(grid["latency"].notna().any())
    column, unit, scale = ("latency", "ms a token", 1e3) if timed else ("eval_kl", "nats", 1.0)
    drafts = list(dict.fromkeys(grid["draft"]))
    title = "Acceptance heads over depth and weight of rejections"
    known = grid.dropna(subset=[column])
    if len(known):
        best = known.iloc[known[column].argmin()]
        title = f"The best head has w_rej = {best['w_rej']:g} and D = {best['depth']}: " + (
            f"{best['speedup']:.2f}× with h = {best['threshold']:g}"
            if timed
            else f"evaluation KL {best['eval_kl']:.3f}"
        )
    fig = base_figure(
        title,
        (
            "Modelled time of an output token with the best stopping threshold h, by the number of "
            "residual blocks D and the weight of rejections in the loss. Dark is fast."
        )
        if timed
        else "Unweighted KL on held-out examples, by the number of residual blocks D and the "
        "weight of rejections in the loss, which a KL without weights does not reward.",
        420,
        make_subplots(rows=1, cols=max(len(drafts), 1), horizontal_spacing=0.14),
    )
    values = grid[column] * scale
    for i, draft in enumerate(drafts, start=1):
        heads = grid[grid["draft"] == draft].assign(value=values)
        pivot = heads.pivot_table("value", "w_rej", "depth", sort=True)
        cells = heads.drop_duplicates(["w_rej", "depth"]).set_index(["w_rej", "depth"], drop=False)
        text, hover = [], []
        for weight in pivot.index:
            row = [cells.loc[(weight, depth)] if (weight, depth) in cells.index else None
                   for depth in pivot.columns]  # fmt: skip
            text.append([_cell(c, timed) for c in row])
            hover.append([_cell_hover(c, timed) for c in row])
        fig.add_heatmap(
            z=pivot.to_numpy(), x=[f"{d}" for d in pivot.columns],
            y=[f"{w:g}" for w in pivot.index], text=text, texttemplate="%{text}",
            customdata=hover, hovertemplate="%{customdata}<extra></extra>", xgap=2, ygap=2,
            name=draft, row=1, col=i, coloraxis="coloraxis",
        )  # fmt: skip
        fig.update_xaxes(title_text=f"depth D, {draft}", type="category", row=1, col=i)
        fig.update_yaxes(title_text="weight of rejections w_rej", type="category", row=1, col=i)
    return scaled(fig, FAST_TO_SLOW, unit)


def _cell(head: pd.Series | None, timed: bool) -> str:
    if head is None or np.isnan(head["value"]):
        return ""
    return f"{head['value']:.3g}<br>h={head['threshold']:g}" if timed else f"{head['value']:.3f}"


def _cell_hover(head: pd.Series | None, timed: bool) -> str:
    if head is None:
        return ""
    lines = [
        f"<b>{short(head['head'])}</b>",
        f"w_rej {head['w_rej']:g}, D {head['depth']}",
        f"KL train {head['train_kl']:.3f}, eval {head['eval_kl']:.3f}",
    ]
    if timed and not np.isnan(head["value"]):
        lines.append(f"{head['speedup']:.2f}× with h = {head['threshold']:g}")
    return "<br>".join(lines)
