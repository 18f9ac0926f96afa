"""The figures of a sweep: its speedups and where they come from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.figures.frontier import hover
from dashboards.look import (
    INK,
    MUTED,
    OTHER_COLOURS,
    PAPER,
    PARTS,
    base_figure,
    family_order,
    style,
)
from dashboards.ranking import (
    champion,
    contenders,
    draft_of,
    family,
    foremost,
    headliners,
    label,
    leaders,
    ranked,
    speedup,
)
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.search.results import SweepResult, Trial

# ----------------------------------------------------------------------------------- speedup bars


def speedups(result: SweepResult, limit: int = 24) -> go.Figure:
    """Speedup over autoregressive decoding: measured ones solid with their 95 % interval, the
    others, estimated from the profile, lighter. At most `limit` bars, fastest first: those timed,
    the fastest of each family, and the next fastest."""
    known = [t for t in ranked(result) if not math.isnan(speedup(result, t).value)]
    chosen = {t.id for t in foremost(result, limit)}
    shown = [t for t in known if t.id in chosen]
    left_out = len(known) - len(shown)
    timed = [t for t in shown if speedup(result, t).timing]
    tied = [t for t in timed if speedup(result, t).timing.tied_with_champion]
    title = "Speedup over autoregressive decoding"
    if timed:
        top = speedup(result, shown[0])
        title = f"{label(result, shown[0])} is {top.value:.2f} times as fast as autoregressive"
        others = len([t for t in tied if t.id != result.champion])
        title += f"; {others} more cannot be told from it" if others else ""
    subtitle = (
        "Solid: timed, with the 95 % bootstrap interval; the small line is what the profile had "
        "estimated. Light: estimated only."
    )
    if any(t.id != result.champion for t in tied):
        subtitle += " “=” marks those tied with the champion."
    if left_out:
        subtitle += f" {left_out} other configurations are in the table."
    fig = base_figure(title, subtitle, 130 + 27 * max(len(shown), 4))
    rows = list(reversed(shown))
    labels = [_bar_label(result, t) for t in rows]
    gains = [speedup(result, t) for t in rows]
    for kind in sorted({family(t) for t in rows}, key=family_order):
        look = style(kind)
        own = [(t, g) for t, g in zip(rows, gains, strict=True) if family(t) == kind]
        measured = [(t, g) for t, g in own if g.timing]
        estimated = [(t, g) for t, g in own if not g.timing]
        for part, opacity in ((measured, 1.0), (estimated, 0.38)):
            if not part:
                continue
            fig.add_bar(
                orientation="h",
                y=[t.id for t, _ in part],
                x=[g.value for _, g in part],
                name=look.name,
                legendgroup=kind,
                showlegend=part is measured or not measured,
                marker={"color": look.colour, "opacity": opacity, "line": {"width": 0}},
                error_x={
                    "type": "data", "symmetric": False, "color": INK, "thickness": 1.4, "width": 4,
                    "array": [g.timing.high - g.value for _, g in part],
                    "arrayminus": [g.value - g.timing.low for _, g in part],
                } if part is measured else None,
                text=[hover(result, t) for t, _ in part],
                textposition="none",
                hovertemplate="%{text}<extra></extra>",
            )  # fmt: skip
    estimates = [
        (t.id, t.metrics["estimated_speedup"]) for t in timed if "estimated_speedup" in t.metrics
    ]
    if estimates:
        fig.add_scatter(
            x=[value for _, value in estimates],
            y=[config for config, _ in estimates],
            mode="markers",
            name="estimate for a timed one",
            marker={"symbol": "line-ns-open", "size": 13, "color": INK, "line": {"width": 2}},
            hovertemplate="estimated %{x:.2f}×<extra></extra>",
        )
    ends = [g.timing.high if g.timing else g.value for g in gains]
    longest = max([1.0, *ends, *(value for _, value in estimates)])
    fig.add_vline(x=1, line={"color": MUTED, "width": 1.5, "dash": "dash"})
    fig.add_scatter(
        x=[longest * 1.02] * len(rows),
        y=[t.id for t in rows],
        text=[f"{g.value:.2f}×" if g.timing else f"≈ {g.value:.2f}×" for g in gains],
        mode="text", textposition="middle right", showlegend=False, hoverinfo="skip",
        cliponaxis=False, name="values",
    )  # fmt: skip
    fig.update_xaxes(
        title_text="times as fast as autoregressive decoding", range=[0, longest * 1.16]
    )
    fig.update_yaxes(
        type="category", tickmode="array", tickvals=[t.id for t in rows], ticktext=labels,
        showgrid=False, categoryorder="array", categoryarray=[t.id for t in rows],
    )  # fmt: skip
    fig.update_layout(bargap=0.28, barmode="overlay")
    return fig


def _bar_label(result: SweepResult, trial: Trial) -> str:
    gain = speedup(result, trial)
    if trial.id == result.champion:
        return f"★ <b>{label(result, trial)}</b>"
    if gain.timing and gain.timing.tied_with_champion:
        return f"= {label(result, trial)}"
    return label(result, trial)


# --------------------------------------------------------------------------- lengths over position


def lengths_over_position(result: SweepResult, rounds: pd.DataFrame, bins: int = 16) -> go.Figure:
    """Mean drafted and accepted tokens a round against the position in the output. The
    headliners are shown; the other contenders wait in the legend."""
    trials = [t for t in contenders(result) if (rounds["config_id"] == t.id).any()]
    shown = {t.id for t in headliners(result)}
    fig = base_figure(
        "How long drafts are, and how much of them survives, along the output",
        "Solid: tokens drafted in a round. Dotted: accepted. The gap between them is thrown away. "
        "A click on a name shows or hides a configuration.",
        440,
    )
    width = max(1, math.ceil(result.max_new_tokens / bins))
    for trial, colour in zip(trials, _distinct_colours(trials), strict=True):
        own = rounds[rounds["config_id"] == trial.id]
        binned = own.groupby(own["position"] // width)[["drafted", "accepted"]]
        mean, count = binned.mean(), binned.size()
        name = label(result, trial)
        for column, dash in (("drafted", "solid"), ("accepted", "dot")):
            fig.add_scatter(
                x=(mean.index.to_numpy() + 0.5) * width,
                y=mean[column].to_numpy(),
                customdata=np.stack([mean.index * width, (mean.index + 1) * width - 1, count], -1),
                mode="lines+markers",
                name=name,
                legendgroup=trial.id,
                showlegend=column == "drafted",
                visible=True if trial.id in shown else "legendonly",
                line={"color": colour, "width": 2.2, "dash": dash},
                marker={"size": 5},
                hovertemplate=f"<b>{name}</b><br>{column} %{{y:.2f}} a round<br>output tokens "
                "%{customdata[0]}–%{customdata[1]}, %{customdata[2]} rounds<extra></extra>",
            )
    fig.update_xaxes(title_text="position in the output (tokens)", rangemode="tozero")
    fig.update_yaxes(title_text="tokens a round (mean)", rangemode="tozero")
    return fig


def _distinct_colours(trials: Sequence[Trial]) -> list[str]:
    """The family's colour for its first trial, a spare one for its others."""
    seen: set[str] = set()
    spare = iter(OTHER_COLOURS * len(trials))
    colours = []
    for trial in trials:
        kind = family(trial)
        colours.append(next(spare) if kind in seen else style(kind).colour)
        seen.add(kind)
    return colours


# --------------------------------------------------------------------------- why the champion wins


def accepted_lengths(result: SweepResult, rounds: pd.DataFrame) -> go.Figure:
    """Share of rounds by accepted tokens; in the second row, by discarded tokens."""
    trials = [t for t in contenders(result) if (rounds["config_id"] == t.id).any()]
    shown = {t.id for t in headliners(result)}
    fig = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.2)
    title = "How many tokens a round yields and wastes"
    if len(pair := headliners(result)) == 2:
        best, other = pair
        title = (
            f"A round of {label(result, best)} yields {best.metrics['mat']:.1f} tokens and "
            f"wastes {_waste(best):.1f}; {label(result, other)}: "
            f"{other.metrics['mat']:.1f} and {_waste(other):.1f}"
        )
    fig = base_figure(
        title,
        "Share of rounds by the number of draft tokens that were accepted (top: more on the right "
        "is better) and thrown away (bottom: less on the right is better).",
        560,
        fig,
    )
    for trial, colour in zip(trials, _distinct_colours(trials), strict=True):
        own = rounds[rounds["config_id"] == trial.id]
        for row, values in enumerate((own["accepted"], own["drafted"] - own["accepted"]), start=1):
            share = values.value_counts(normalize=True).sort_index()
            what = "accepted" if row == 1 else "thrown away"
            fig.add_bar(
                x=share.index.to_numpy(),
                y=share.to_numpy(),
                name=label(result, trial),
                legendgroup=trial.id,
                showlegend=row == 1,
                visible=True if trial.id in shown else "legendonly",
                marker={"color": colour, "line": {"width": 0}},
                hovertemplate=f"<b>{label(result, trial)}</b><br>%{{x}} {what} in %{{y:.1%}} "
                "of its rounds<extra></extra>",
                row=row,
                col=1,
            )
    fig.update_yaxes(tickformat=".0%")
    fig.update_yaxes(title_text="share of rounds", row=1, col=1)
    fig.update_yaxes(title_text="share of rounds", row=2, col=1)
    fig.update_xaxes(showticklabels=True, title_text="accepted tokens in a round", row=1, col=1)
    fig.update_xaxes(title_text="thrown-away tokens in a round", row=2, col=1)
    fig.update_layout(bargap=0.15)
    return fig


def _waste(trial: Trial) -> float:
    return trial.counts["n_discarded"] / max(trial.counts["n_target"], 1)


def time_per_token(result: SweepResult) -> go.Figure:
    """Where the time of one output token goes (Eq. 3.1 with the profile's forward times): target
    forwards, draft forwards of tokens that were kept, draft forwards that were wasted."""
    best = champion(result)
    chosen = {t.id: t for t in [*([best] if best else []), *leaders(result)]}
    rows = [t for t in chosen.values() if t.configuration.drafter is not None]
    parts = {t.id: _milliseconds(result, t) for t in rows}
    names = {t.id: label(result, t) for t in rows}
    names["autoregressive"] = AUTOREGRESSIVE.label
    profile = result.profile
    forward = profile.autoregressive_seconds(1) - profile.round_overhead
    parts["autoregressive"] = [1e3 * forward, 0.0, 0.0, 1e3 * profile.round_overhead]
    keys = list(reversed(names))
    fig = base_figure(
        "Where the time of one output token goes",
        "The fastest configuration of each family, counts times the profile's forward times "
        "(Eq. 3.1, verification at its real width). The diamonds are the measured totals, "
        "prefill included.",
        170 + 34 * len(keys),
    )
    for i, (part, colour) in enumerate(PARTS.items()):
        if not any(parts[k][i] for k in keys):
            continue
        fig.add_bar(
            orientation="h", y=keys, x=[parts[k][i] for k in keys], name=part,
            marker={"color": colour, "line": {"width": 0}},
            customdata=[names[k] for k in keys],
            hovertemplate=f"<b>%{{customdata}}</b><br>{part} %{{x:.3f}} ms a token<extra></extra>",
        )  # fmt: skip
    measured = {t.config_id: t for t in result.timings}
    if result.autoregressive is not None:
        measured["autoregressive"] = result.autoregressive
    timed = [k for k in keys if k in measured]
    if timed:
        fig.add_scatter(
            x=[1e3 / measured[k].tokens_per_second for k in timed], y=timed, mode="markers",
            name="measured",
            marker={
                "symbol": "diamond", "size": 11, "color": INK,
                "line": {"color": PAPER, "width": 1.5},
            },
            customdata=[names[k] for k in timed],
            hovertemplate="<b>%{customdata}</b><br>measured %{x:.3f} ms a token<extra></extra>",
        )  # fmt: skip
    fig.update_layout(barmode="stack", bargap=0.32)
    fig.update_xaxes(title_text="time of one output token (ms)", rangemode="tozero")
    fig.update_yaxes(
        type="category", tickmode="array", tickvals=keys, showgrid=False,
        ticktext=[f"★ <b>{names[k]}</b>" if k == result.champion else names[k] for k in keys],
        categoryorder="array", categoryarray=keys,
    )  # fmt: skip
    return fig


def _milliseconds(result: SweepResult, trial: Trial) -> list[float]:
    """Target, kept drafts, wasted drafts, engine; their sum is the profile's estimate."""
    counts, draft, profile = trial.counts, draft_of(result, trial), result.profile
    n, n_target = max(counts["n"], 1), max(counts["n_target"], 1)
    verify = profile.t_target(1 + counts["n_drafted"] / n_target)
    wasted = min(counts["n_discarded"], counts["n_draft"])
    t_draft = profile.t_draft(draft) if draft else 0.0
    return [
        1e3 * verify * counts["n_target"] / n,
        1e3 * t_draft * (counts["n_draft"] - wasted) / n,
        1e3 * t_draft * wasted / n,
        1e3 * profile.round_overhead * counts["n_target"] / n,
    ]
