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
    DASHED,
    INK,
    OTHER_COLOURS,
    PAPER,
    PARTS,
    base_figure,
    family_order,
    intervals,
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

# Speedup bars


def speedups(result: SweepResult, limit: int = 24) -> go.Figure:
    """Speedup over autoregressive decoding: measured ones solid with their 95 % interval, the
    others, estimated from the profile, lighter. At most `limit` bars, fastest first: those timed,
    the fastest of each family, and the next fastest."""
    known = [t for t in ranked(result) if not math.isnan(speedup(result, t).value)]
    chosen = {t.id for t in foremost(result, limit)}
    shown = [t for t in known if t.id in chosen]
    title, subtitle = _speedup_titles(result, shown, len(known) - len(shown))
    fig = base_figure(title, subtitle, 130 + 27 * max(len(shown), 4))
    rows = list(reversed(shown))
    for kind in sorted({family(t) for t in rows}, key=family_order):
        fig.add_traces(_bars(result, [t for t in rows if family(t) == kind], kind))
    estimates = _estimates([t for t in shown if speedup(result, t).timing])
    fig.add_traces(estimates)
    gains = [speedup(result, t) for t in rows]
    ends = [gain.timing.high if gain.timing else gain.value for gain in gains]
    longest = max([1.0, *ends, *(x for trace in estimates for x in trace.x)])
    fig.add_vline(x=1, line=DASHED)
    fig.add_scatter(
        x=[longest * 1.02] * len(rows), y=[t.id for t in rows],
        text=[f"{g.value:.2f}×" if g.timing else f"≈ {g.value:.2f}×" for g in gains],
        mode="text", textposition="middle right", showlegend=False, hoverinfo="skip",
        cliponaxis=False, name="values",
    )  # fmt: skip
    fig.update_xaxes(
        title_text="times as fast as autoregressive decoding", range=[0, longest * 1.16]
    )
    fig.update_yaxes(
        type="category", tickmode="array", tickvals=[t.id for t in rows],
        ticktext=[_bar_label(result, t) for t in rows],
        showgrid=False, categoryorder="array", categoryarray=[t.id for t in rows],
    )  # fmt: skip
    return fig.update_layout(bargap=0.28, barmode="overlay")


def _speedup_titles(result: SweepResult, shown: Sequence[Trial], left_out: int) -> tuple[str, str]:
    """Title and subtitle."""
    timings = [timing for t in shown if (timing := speedup(result, t).timing)]
    others = [t for t in timings if t.tied_with_champion and t.config_id != result.champion]
    title = "Speedup over autoregressive decoding"
    if timings:
        top = speedup(result, shown[0])
        title = f"{label(result, shown[0])} is {top.value:.2f} times as fast as autoregressive"
        title += f"; {len(others)} more cannot be told from it" if others else ""
    subtitle = (
        "Solid: timed, with the 95 % bootstrap interval; the small line is what the profile had "
        "estimated. Light: estimated only."
    )
    if others:
        subtitle += " “=” marks those tied with the champion."
    if left_out:
        subtitle += f" {left_out} other configurations are in the table."
    return title, subtitle


def _bars(result: SweepResult, trials: Sequence[Trial], kind: str) -> list[go.Bar]:
    """A family's bars, those timed and those estimated."""
    look, traces = style(kind), list[go.Bar]()
    for timed in (True, False):
        part = [t for t in trials if bool(speedup(result, t).timing) == timed]
        if not part:
            continue
        gains = [speedup(result, t) for t in part]
        values = [gain.value for gain in gains]
        ends = [(gain.timing.low, gain.timing.high) for gain in gains if gain.timing]
        bars = go.Bar(
            orientation="h", y=[t.id for t in part], x=values,
            name=look.name, legendgroup=kind, showlegend=not traces,
            marker={
                "color": look.colour, "opacity": 1.0 if timed else 0.38, "line": {"width": 0},
            },
            error_x=intervals(values, *zip(*ends, strict=True)) if timed else None,
            text=[hover(result, t) for t in part], textposition="none",
            hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip
        traces.append(bars)
    return traces


def _estimates(timed: Sequence[Trial]) -> list[go.Scatter]:
    """What the profile had estimated for those timed."""
    known = [t for t in timed if "estimated_speedup" in t.metrics]
    marks = go.Scatter(
        x=[t.metrics["estimated_speedup"] for t in known], y=[t.id for t in known],
        mode="markers", name="estimate for a timed one", hovertemplate="estimated %{x:.2f}×"
        "<extra></extra>",
        marker={"symbol": "line-ns-open", "size": 13, "color": INK, "line": {"width": 2}},
    )  # fmt: skip
    return [marks] if known else []


def _bar_label(result: SweepResult, trial: Trial) -> str:
    gain = speedup(result, trial)
    if trial.id == result.champion:
        return f"★ <b>{label(result, trial)}</b>"
    if gain.timing and gain.timing.tied_with_champion:
        return f"= {label(result, trial)}"
    return label(result, trial)


# Lengths over position


def lengths_over_position(result: SweepResult, rounds: pd.DataFrame, bins: int = 16) -> go.Figure:
    """Mean drafted and accepted tokens a round against the position in the output. The headliners
    are shown; the other contenders are hidden until clicked in the legend."""
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
        selected = rounds[rounds["config_id"] == trial.id]
        binned = selected.groupby(selected["position"] // width)[["drafted", "accepted"]]
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


# Why the champion wins


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
        selected = rounds[rounds["config_id"] == trial.id]
        outcomes = {
            "accepted": selected["accepted"],
            "thrown away": selected["drafted"] - selected["accepted"],
        }
        for row, (outcome, values) in enumerate(outcomes.items(), start=1):
            share = values.value_counts(normalize=True).sort_index()
            fig.add_bar(
                x=share.index.to_numpy(),
                y=share.to_numpy(),
                name=label(result, trial),
                legendgroup=trial.id,
                showlegend=row == 1,
                visible=True if trial.id in shown else "legendonly",
                marker={"color": colour, "line": {"width": 0}},
                hovertemplate=f"<b>{label(result, trial)}</b><br>%{{x}} {outcome} in %{{y:.1%}} "
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
