"""The figures of a sweep: its speedups and where they come from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from dashboards.figures.frontier import hover
from dashboards.look import (
    DASHED,
    INK,
    PAPER,
    PART_COLOURS,
    base_figure,
    family_order,
    style,
)
from dashboards.ranking import champion, draft_of, family, foremost, leaders, ranked, speedup
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.search.results import METRIC, SweepResult, Trial


def speedups(result: SweepResult, limit: int = 24) -> go.Figure:
    """Speedup over autoregressive decoding: measured speedups solid with their 95 % interval,
    estimates from the profile lighter. At most `limit` bars, fastest first: those timed,
    the fastest of each family, and the next fastest."""
    known = [t for t in ranked(result) if not math.isnan(speedup(result, t).value)]
    chosen = {t.id for t in foremost(result, limit)}
    shown = [t for t in known if t.id in chosen]
    title, subtitle = _speedup_titles(result, shown, len(known) - len(shown))
    fig = base_figure(title, subtitle, 130 + 27 * max(len(shown), 4))
    rows = list(reversed(shown))
    for kind in sorted({family(t) for t in rows}, key=family_order):
        part = [t for t in rows if family(t) == kind]
        gains = [speedup(result, t) for t in part]
        fig.add_bar(
            orientation="h", y=[t.id for t in part], x=[g.value for g in gains],
            name=style(kind).name,
            marker={
                "color": style(kind).colour, "line": {"width": 0},
                "opacity": [1.0 if g.timing else 0.38 for g in gains],
            },
            error_x={
                "type": "data", "symmetric": False, "color": INK, "thickness": 1.2, "width": 3,
                "array": [g.timing.high - g.value if g.timing else math.nan for g in gains],
                "arrayminus": [g.value - g.timing.low if g.timing else math.nan for g in gains],
            },
            hovertext=[hover(result, t) for t in part], hovertemplate="%{hovertext}<extra></extra>",
        )  # fmt: skip
    estimated = [t for t in shown if speedup(result, t).timing and METRIC in t.metrics]
    fig.add_scatter(
        x=[t.metrics[METRIC] for t in estimated], y=[t.id for t in estimated],
        mode="markers", name="estimate for a timed one", visible=bool(estimated),
        hovertemplate="estimated %{x:.2f}×<extra></extra>",
        marker={"symbol": "line-ns-open", "size": 13, "color": INK, "line": {"width": 2}},
    )  # fmt: skip
    gains = [speedup(result, t) for t in rows]
    ends = [gain.timing.high if gain.timing else gain.value for gain in gains]
    longest = max([1.0, *ends, *(t.metrics[METRIC] for t in estimated)])
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
    _named_rows(fig, {t.id: _bar_label(result, t) for t in rows})
    return fig.update_layout(bargap=0.28, barmode="overlay")


def _speedup_titles(result: SweepResult, shown: Sequence[Trial], left_out: int) -> tuple[str, str]:
    """Title and subtitle."""
    timings = [timing for t in shown if (timing := speedup(result, t).timing)]
    others = [t for t in timings if t.tied_with_champion and t.config_id != result.champion]
    title = "Speedup over autoregressive decoding"
    if timings:
        top = speedup(result, shown[0])
        title = f"{result.labels[shown[0].id]} is {top.value:.2f} times as fast as autoregressive"
        if others and shown[0].id == result.champion:
            title += f"; {len(others)} more cannot be told from it"
    subtitle = (
        "Solid: timed, with the 95 % bootstrap interval; the small line is what the profile had "
        "estimated. Light: estimated only."
    )
    if others:
        subtitle += " “=” marks those tied with the champion."
    if left_out:
        subtitle += f" {left_out} other configurations are in the table."
    return title, subtitle


def _bar_label(result: SweepResult, trial: Trial) -> str:
    label, timing = result.labels[trial.id], speedup(result, trial).timing
    if trial.id == result.champion:
        return f"★ <b>{label}</b>"
    return f"= {label}" if timing and timing.tied_with_champion else label


def _named_rows(fig: go.Figure, names: dict[str, str]) -> None:
    """Show the name of each category of the y axis, from the bottom."""
    fig.update_yaxes(
        type="category", tickmode="array", tickvals=[*names], ticktext=[*names.values()],
        showgrid=False, categoryorder="array", categoryarray=[*names],
    )  # fmt: skip


def time_per_token(result: SweepResult) -> go.Figure:
    """Where the time of one output token goes (Eq. 3.1 with the profile's forward times): target
    forwards, draft forwards of tokens that were kept, draft forwards that were wasted."""
    best, profile = champion(result), result.profile
    rows = {t.id: t for t in [*([best] if best else []), *leaders(result)]}
    names = {key: result.labels[key] for key in rows}
    if result.champion in names:
        names[result.champion] = f"★ <b>{names[result.champion]}</b>"
    times = {key: _milliseconds(result, trial) for key, trial in rows.items()}
    forward = profile.autoregressive_seconds(1) - profile.round_overhead
    plain = "autoregressive"
    names[plain] = AUTOREGRESSIVE.label
    times[plain] = np.array([1e3 * forward, 0.0, 0.0, 1e3 * profile.round_overhead])
    keys = list(reversed(names))
    fig = base_figure(
        "Where the time of one output token goes",
        "The fastest configuration of each family, counts times the profile's forward times "
        "(SpecDec++, Eq. 3.1, verification at its real width). The diamonds are the measured "
        "totals, prefill included.",
        170 + 34 * len(keys),
    )
    for i, (part, colour) in enumerate(PART_COLOURS.items()):
        if any(times[key][i] for key in keys):
            fig.add_bar(
                orientation="h", y=keys, x=[times[key][i] for key in keys], name=part,
                marker={"color": colour, "line": {"width": 0}},
                hovertemplate=f"{part} %{{x:.3f}} ms a token<extra></extra>",
            )  # fmt: skip
    measured = {t.config_id: t for t in result.timings}
    if result.autoregressive is not None:
        measured[plain] = result.autoregressive
    timed = [key for key in keys if key in measured]
    fig.add_scatter(
        x=[1e3 / measured[key].tokens_per_second for key in timed], y=timed, mode="markers",
        name="measured", visible=bool(timed),
        marker={
            "symbol": "diamond", "size": 11, "color": INK, "line": {"color": PAPER, "width": 1.5},
        },
        hovertemplate="measured %{x:.3f} ms a token<extra></extra>",
    )  # fmt: skip
    fig.update_xaxes(title_text="time of one output token (ms)", rangemode="tozero")
    _named_rows(fig, {key: names[key] for key in keys})
    return fig.update_layout(barmode="stack", bargap=0.32)


def _milliseconds(result: SweepResult, trial: Trial) -> np.ndarray:
    """Target, kept drafts, wasted drafts, engine; their sum is the profile's estimate."""
    counts, draft = trial.counts, draft_of(result, trial)
    profile = result.profile.under(trial.configuration)
    n_target = counts["n_target"]
    verify = profile.t_target(1 + counts["n_drafted"] / max(n_target, 1))
    # Counts of older sweeps lack it: the most that it can be.
    kept = counts.get("n_draft_kept", min(counts["n_accepted"], counts["n_draft"]))
    width = max(counts["n_draft_tokens"] / max(counts["n_draft"], 1), 1)
    t_draft = profile.t_draft(draft, width=width) if draft else 0.0
    seconds = [
        verify * n_target,
        t_draft * kept,
        t_draft * (counts["n_draft"] - kept),
        profile.round_overhead * n_target,
    ]
    return 1e3 * np.array(seconds) / max(counts["n"], 1)
