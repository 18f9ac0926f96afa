"""The figures of a sweep: functions from its result to plotly figures, for the report and for
notebooks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.look import (
    INK,
    MUTED,
    OTHER_COLOURS,
    PAPER,
    PARTS,
    STYLES,
    TARGET_COLOUR,
    base_figure,
    family_order,
    style,
)
from dashboards.ranking import champion, contenders, draft_of, headliners, label, ranked, speedup
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.cost import Profile, latency
from specdec_core.results import SweepResult, Trial

# ------------------------------------------------------------------ verification against discard


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that no other beats in both rates, by rising discard rate."""
    front: list[Trial] = []
    for trial in sorted(
        trials, key=lambda t: (t.metrics["discard_rate"], t.metrics["verification_rate"])
    ):
        if not front or trial.metrics["verification_rate"] < front[-1].metrics["verification_rate"]:
            front.append(trial)
    return front


def frontier(result: SweepResult) -> go.Figure:
    """Verification rate against discard rate (SpecDec++, Fig. 3).

    One trace a family and draft, its Pareto frontier connected; the oracle of each draft
    (Theorem 4.1) at discard rate 0; behind them lines of equal latency (Eq. 5.1).
    """
    best = champion(result)
    title = "Verification rate against discard rate"
    if best is not None:
        rate = best.metrics
        title = (
            f"{label(best)} runs the target {rate['verification_rate']:.2f} times "
            f"and throws away {rate['discard_rate']:.2f} draft tokens per output token"
        )
    fig = base_figure(
        title,
        "Each point is one configuration; down and to the left is better, on any hardware. "
        "The line joins a family's best trade-offs, stars are the oracle, and on a grey line "
        "every point is equally fast here.",
        560,
    )
    trials = ranked(result)
    groups: dict[tuple[str, str | None], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.configuration.family, draft_of(result, trial)), []).append(trial)

    view = _view(result, trials)
    for name in result.pair.drafts:
        leading = name == (best and draft_of(result, best)) or len(result.pair.drafts) == 1
        fig.add_traces(_iso_lines(result, name, view, visible=bool(leading)))

    drafts = list(result.pair.drafts)

    def order(group: tuple[str, str | None]) -> tuple[int, tuple[int, str]]:
        family, draft = group
        place = drafts.index(draft) if draft in drafts else len(drafts)
        return place, family_order(family)

    for family, draft in sorted(groups, key=order):
        members = groups[family, draft]
        look = style(family)
        second = draft in drafts[1:]
        front = pareto(members)
        on_front = {t.id for t in front}
        behind = [t for t in members if t.id not in on_front]
        name = f"{look.name} · {draft}" if draft and len(drafts) > 1 else look.name
        for part, opacity in ((front, 1.0), (behind, 0.4)):
            if part:
                fig.add_scatter(
                    x=[t.metrics["discard_rate"] for t in part],
                    y=[t.metrics["verification_rate"] for t in part],
                    mode="lines+markers" if part is front else "markers",
                    name=name,
                    legendgroup=name,
                    showlegend=part is front,
                    opacity=opacity,
                    line={"color": look.colour, "width": 2, "dash": "dot" if second else "solid"},
                    marker={
                        "color": look.colour, "size": 11,
                        "line": {"color": look.colour if second else PAPER, "width": 1.3},
                        "symbol": look.symbol + ("-open" if second else ""),
                    },
                    text=[_hover(result, t) for t in part],
                    hovertemplate="%{text}<extra></extra>",
                )  # fmt: skip
        if family == "fixed":
            ends = (front[0], front[-1])
            fig.add_scatter(
                x=[t.metrics["discard_rate"] for t in ends],
                y=[t.metrics["verification_rate"] for t in ends],
                text=[f"\u2002K={t.configuration.drafter.policy.max_tokens}" for t in ends],
                mode="text", textposition="middle right", textfont={"size": 11, "color": MUTED},
                name=name, legendgroup=name, showlegend=False, hoverinfo="skip",
            )  # fmt: skip
    for oracle in result.oracles:
        fig.add_scatter(
            x=[0.0],
            y=[oracle.verification_rate],
            mode="markers",
            name=f"oracle · {oracle.draft}" if len(drafts) > 1 else "oracle",
            legendrank=1001,
            marker={
                "symbol": "star-open" if oracle.draft in drafts[1:] else "star",
                "size": 14, "color": MUTED, "line": {"color": MUTED, "width": 1.5},
            },
            hovertemplate=f"<b>oracle of {oracle.draft}</b><br>discards nothing, verifies once a "
            f"disagreement<br>verification rate {oracle.verification_rate:.3f}<br>predicted "
            f"speedup {oracle.speedup:.2f}×<extra></extra>",
        )  # fmt: skip
    if best is not None:
        fig.add_annotation(
            x=best.metrics["discard_rate"],
            y=best.metrics["verification_rate"],
            text=f"<b>champion</b> {speedup(result, best).value:.2f}×",
            showarrow=True,
            arrowcolor=MUTED,
            arrowwidth=1.2,
            arrowhead=2,
            standoff=7,
            bgcolor=PAPER,
            ax=36,
            ay=44,
        )
    fig.update_layout(margin_r=48)  # for the speedups of the grey lines
    fig.update_xaxes(title_text="discard rate  N_discarded / N", range=[view.left, view.right])
    fig.update_yaxes(title_text="verification rate  N_target / N", range=[view.low, view.high])
    return fig


class View(NamedTuple):
    left: float
    right: float
    low: float
    high: float


def _view(result: SweepResult, trials: Sequence[Trial]) -> View:
    """Axis ranges that hold every point and leave room below for the champion's label."""
    x = [t.metrics["discard_rate"] for t in trials] or [1.0]
    y = [t.metrics["verification_rate"] for t in trials] + [
        o.verification_rate for o in result.oracles
    ] or [0.0, 1.0]
    width, height = max(max(x), 0.1), max(max(y) - min(y), 0.05)
    return View(
        -0.03 * width, 1.05 * width, max(0.0, min(y) - 0.16 * height), max(y) + 0.06 * height
    )


class IsoLatency(NamedTuple):
    """Eq. 5.1 on one machine, as a map between the rates and the speedup.

    `t_draft` is the time of drafting one more candidate and of verifying it, `t_target` that of a
    round without candidates. The profile's target cost is affine in the width, so lines of equal
    latency are straight, and they agree with the estimated speedups of chains.
    """

    t_draft: float
    t_target: float
    autoregressive: float

    def gain(self, discard: float, verification: float) -> float:
        """Speedup over autoregressive decoding at these rates."""
        return self.autoregressive / latency(self.t_draft, self.t_target, discard, verification)

    def verification(self, gain: float, discard: float) -> float:
        """The verification rate at which `discard` has the speedup `gain`."""
        rest = self.autoregressive / gain - self.t_draft * (1 + discard)
        return rest / (self.t_target - self.t_draft)

    def discard(self, gain: float, verification: float) -> float:
        """The discard rate at which `verification` has the speedup `gain`."""
        rest = self.autoregressive / gain - (self.t_target - self.t_draft) * verification
        return rest / self.t_draft - 1


def iso_latency(profile: Profile, draft: str) -> IsoLatency:
    """Eq. 5.1 with the profile's times."""
    per_candidate = profile.t_target(3) - profile.t_target(2)
    return IsoLatency(
        profile.t_draft(draft) + per_candidate,
        profile.t_target(2) - per_candidate + profile.round_overhead,
        profile.autoregressive_seconds(1),
    )


def _iso_lines(result: SweepResult, draft: str, view: View, visible: bool) -> list[go.Scatter]:
    """Lines of equal latency, labelled with their speedup over autoregressive decoding."""
    plane = iso_latency(result.profile, draft)
    if plane.t_target <= plane.t_draft:
        return []
    fast, slow = plane.gain(0, max(view.low, 1e-3)), plane.gain(view.right, view.high)
    step = next(s for s in (0.05, 0.1, 0.2, 0.25, 0.5, 1, 2, 5, 1e9) if (fast - slow) / s <= 8)
    group = "equal latency" + (f" · {draft}" if len(result.pair.drafts) > 1 else "")
    x: list[float | None] = []
    y: list[float | None] = []
    labels: list[tuple[float, float, str, str]] = []
    for multiple in range(max(1, math.ceil(slow / step)), math.floor(fast / step) + 1):
        gain = multiple * step
        start = max(view.left, plane.discard(gain, view.high))
        end = min(view.right, plane.discard(gain, view.low))
        if end - start < 0.04 * (view.right - view.left):
            continue
        bottom = max(view.low, plane.verification(gain, end))
        x += [start, end, None]
        y += [plane.verification(gain, start), bottom, None]
        side = "middle right" if end == view.right else "top right"
        labels.append((end, bottom, f"{gain:g}×", side))
    common = {
        "legendgroup": group, "legendrank": 1002, "name": group, "hoverinfo": "skip",
        "visible": True if visible else "legendonly",
    }  # fmt: skip
    lines = go.Scatter(
        x=x, y=y, mode="lines", line={"color": "rgba(128,134,145,0.42)", "width": 1}, **common
    )
    text = go.Scatter(
        x=[point[0] for point in labels],
        y=[point[1] for point in labels],
        text=[point[2] for point in labels],
        textposition=[point[3] for point in labels],
        mode="text",
        textfont={"size": 11, "color": MUTED},
        cliponaxis=False,
        showlegend=False,
        **common,
    )
    return [lines, text]


def _hover(result: SweepResult, trial: Trial) -> str:
    m = trial.metrics
    kind = "measured" if speedup(result, trial).timing else "estimated"
    return "<br>".join([
        f"<b>{label(trial)}</b>{' (champion)' if trial.id == result.champion else ''}",
        f"speedup {speedup(result, trial).text} ({kind})",
        f"verification rate {m['verification_rate']:.3f}",
        f"discard rate {m['discard_rate']:.3f}",
        f"MAT {m['mat']:.2f} tokens per target forward",
        f"accepted / drafted {m['acceptance_rate']:.2f}",
    ])  # fmt: skip


# ----------------------------------------------------------------------------------- speedup bars


def speedups(result: SweepResult, limit: int = 24) -> go.Figure:
    """Speedup over autoregressive decoding: measured ones solid with their 95 % interval, the
    others, estimated from the profile, lighter. At most `limit` bars, fastest first."""
    trials = [t for t in ranked(result) if not math.isnan(speedup(result, t).value)]
    shown, left_out = trials[:limit], max(0, len(trials) - limit)
    timed = [t for t in shown if speedup(result, t).timing]
    tied = [t for t in timed if speedup(result, t).timing.tied_with_champion]
    title = "Speedup over autoregressive decoding"
    if timed:
        top = speedup(result, shown[0])
        title = f"{label(shown[0])} is {top.value:.2f} times as fast as autoregressive"
        others = len([t for t in tied if t.id != result.champion])
        title += f"; {others} more cannot be told from it" if others else ""
    subtitle = (
        "Solid: timed, with the 95 % bootstrap interval; the small line is what the profile had "
        "estimated. Light: estimated only."
    )
    if any(t.id != result.champion for t in tied):
        subtitle += " “=” marks those tied with the champion."
    if left_out:
        subtitle += f" {left_out} slower configurations are in the table."
    fig = base_figure(title, subtitle, 130 + 27 * max(len(shown), 4))
    rows = list(reversed(shown))
    labels = [_bar_label(result, t) for t in rows]
    gains = [speedup(result, t) for t in rows]
    for family in sorted({t.configuration.family for t in rows}, key=family_order):
        look = style(family)
        own = [(t, g) for t, g in zip(rows, gains, strict=True) if t.configuration.family == family]
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
                legendgroup=family,
                showlegend=part is measured or not measured,
                marker={"color": look.colour, "opacity": opacity, "line": {"width": 0}},
                error_x={
                    "type": "data", "symmetric": False, "color": INK, "thickness": 1.4, "width": 4,
                    "array": [g.timing.high - g.value for _, g in part],
                    "arrayminus": [g.value - g.timing.low for _, g in part],
                } if part is measured else None,
                text=[_hover(result, t) for t, _ in part],
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
        return f"★ <b>{label(trial)}</b>"
    if gain.timing and gain.timing.tied_with_champion:
        return f"= {label(trial)}"
    return label(trial)


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
        name = label(trial)
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
        family = trial.configuration.family
        colours.append(next(spare) if family in seen else style(family).colour)
        seen.add(family)
    return colours


# ---------------------------------------------------------------------------------- forward times


def forward_times(result: SweepResult) -> go.Figure:
    """Seconds of one forward against its width n, target and drafts, measured and fitted."""
    profile = result.profile
    costs = {"target": profile.target}
    costs |= {
        name if "draft" in name else f"draft {name}": cost for name, cost in profile.drafts.items()
    }
    batches = sorted({m.batch for cost in costs.values() for m in cost.measurements})
    widest = max((m.width for m in profile.target.measurements), default=1)
    one, many = profile.target.seconds(width=1), profile.target.seconds(width=widest)
    fig = base_figure(
        f"Verifying {widest} tokens at once takes the target {many / one:.2f} times as long as one",
        "Median time of one forward: dots are measured (stronger: longer context), lines the fit "
        "that turns counts into estimated speedups.",
        440,
    )
    colours = [TARGET_COLOUR, STYLES["fixed"].colour, STYLES["heuristic"].colour, *OTHER_COLOURS]
    for (role, cost), colour in zip(costs.items(), colours * len(costs), strict=False):
        for batch in batches:
            points = [m for m in cost.measurements if m.batch == batch]
            if not points:
                continue
            name = role if len(batches) == 1 else f"{role}, batch {batch}"
            visible = True if batch == batches[0] else "legendonly"
            contexts = sorted({m.context for m in points})
            middle = contexts[len(contexts) // 2]
            widths = list(range(1, max(m.width for m in points) + 1))
            fig.add_scatter(
                x=widths,
                y=[1e3 * cost.seconds(width=w, context=middle, batch=batch) for w in widths],
                mode="lines",
                name=name,
                legendgroup=name,
                visible=visible,
                line={"color": colour, "width": 2},
                hovertemplate=f"<b>{name}</b> fit, context {middle}<br>n = %{{x:.0f}}: "
                f"%{{y:.2f}} ms<br>R² {cost.r2:.3f}<extra></extra>",
            )
            fig.add_scatter(
                x=[m.width for m in points],
                y=[1e3 * m.seconds for m in points],
                customdata=[m.context for m in points],
                mode="markers",
                name=name,
                legendgroup=name,
                showlegend=False,
                visible=visible,
                marker={
                    "color": colour, "size": 8,
                    "opacity": [
                        0.35 + 0.65 * (contexts.index(m.context) + 1) / len(contexts)
                        for m in points
                    ],
                },
                hovertemplate=f"<b>{name}</b> measured<br>n = %{{x}}, context %{{customdata}}: "
                "%{y:.2f} ms<extra></extra>",
            )  # fmt: skip
    fig.update_xaxes(title_text="n, tokens in one forward", rangemode="tozero")
    fig.update_yaxes(title_text="time of a forward (ms)", rangemode="tozero")
    return fig


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
            f"A round of {label(best)} yields {best.metrics['mat']:.1f} tokens and "
            f"wastes {_waste(best):.1f}; {label(other)}: "
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
                name=label(trial),
                legendgroup=trial.id,
                showlegend=row == 1,
                visible=True if trial.id in shown else "legendonly",
                marker={"color": colour, "line": {"width": 0}},
                hovertemplate=f"<b>{label(trial)}</b><br>%{{x}} {what} in %{{y:.1%}} "
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
    families: dict[str, Trial] = {}
    for trial in ranked(result):
        families.setdefault(trial.configuration.family, trial)
    chosen = {t.id: t for t in [*([best] if best else []), *families.values()]}
    rows = [t for t in chosen.values() if t.configuration.drafter is not None]
    parts = {t.id: _milliseconds(result, t) for t in rows}
    names = {t.id: label(t) for t in rows}
    names["autoregressive"] = AUTOREGRESSIVE.label
    profile = result.profile
    parts["autoregressive"] = [1e3 * profile.t_target(), 0.0, 0.0, 1e3 * profile.round_overhead]
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
