"""The trade-off that every drafting configuration makes: target forwards against wasted drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from dashboards.look import MUTED, PAPER, base_figure, family_order, style
from dashboards.ranking import champion, draft_of, family, label, ranked, speedup
from specdec_core.cost import Profile, latency
from specdec_core.search.results import SweepResult, Trial

CROWD = 10  # more fronts than this cannot be told apart


class View(NamedTuple):
    left: float
    right: float
    low: float
    high: float


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that no other beats in both rates, by rising discard rate."""
    front: list[Trial] = []
    for trial in sorted(
        trials, key=lambda t: (t.metrics["discard_rate"], t.metrics["verification_rate"])
    ):
        if not front or trial.metrics["verification_rate"] < front[-1].metrics["verification_rate"]:
            front.append(trial)
    return front


def thin(trials: Sequence[Trial], view: View, most: int = 150, cells: int = 36) -> list[Trial]:
    """Few enough trials to draw: all, or one of each family in each cell of a grid over `view`."""
    if len(trials) <= most:
        return list(trials)
    kept: dict[tuple[str, int, int], Trial] = {}
    for trial in trials:
        across = (trial.metrics["discard_rate"] - view.left) / (view.right - view.left)
        up = (trial.metrics["verification_rate"] - view.low) / (view.high - view.low)
        kept.setdefault((family(trial), int(cells * across), int(cells * up)), trial)
    return list(kept.values())


def frontier(result: SweepResult) -> go.Figure:
    """Verification rate against discard rate (SpecDec++, Fig. 3).

    One trace a family and draft, its Pareto frontier connected; the oracle of each draft
    (Theorem 4.1) at discard rate 0; behind them lines of equal latency (Eq. 5.1). Points behind
    the frontiers are faint, and thinned where there are hundreds. With many families, drafts
    other than the champion's wait in the legend.
    """
    best = champion(result)
    title = "Verification rate against discard rate"
    if best is not None:
        rate = best.metrics
        title = (
            f"{label(result, best)} runs the target {rate['verification_rate']:.2f} times "
            f"and throws away {rate['discard_rate']:.2f} draft tokens per output token"
        )
    fig = base_figure(
        title,
        "Each point is one configuration; down and to the left is better, on any hardware. "
        "The line joins a family's best trade-offs, stars are the oracle, and on a grey line "
        "every chain of the draft is equally fast here.",
        560,
    )
    trials = ranked(result)
    groups: dict[tuple[str, str | None], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((family(trial), draft_of(result, trial)), []).append(trial)

    drafts = list(result.pair.drafts)
    leading = draft_of(result, best) if best else None
    leading = leading or next(iter(drafts), None)
    crowded = len(groups) > CROWD
    first_seen = [t for t in trials if not crowded or draft_of(result, t) in (leading, None)]
    view = _view(result, first_seen)
    for name in drafts:
        fig.add_traces(_iso_lines(result, name, view, visible=name == leading))

    def order(group: tuple[str, str | None]) -> tuple[int, tuple[int, str]]:
        kind, draft = group
        place = drafts.index(draft) if draft in drafts else len(drafts)
        return place - len(drafts) * (draft == leading), family_order(kind)

    fronts = {group: pareto(members) for group, members in groups.items()}
    on_front = {trial.id for front in fronts.values() for trial in front}
    behind = [t for t in trials if t.id not in on_front]
    shown = {t.id for t in thin(behind, view)}
    left_out = len(behind) - len(shown)
    faint = 0.4 if len(shown) < 40 else 0.22
    for kind, draft in sorted(groups, key=order):
        look = style(kind)
        second = draft not in (leading, None)
        front = fronts[kind, draft]
        rest = [t for t in groups[kind, draft] if t.id in shown]
        name = f"{look.name} · {draft}" if draft and len(drafts) > 1 else look.name
        large = 10 if len(front) < 25 else 7
        for part, opacity, size in ((front, 1.0, large), (rest, faint, 7)):
            if part:
                fig.add_scatter(
                    x=[t.metrics["discard_rate"] for t in part],
                    y=[t.metrics["verification_rate"] for t in part],
                    mode="lines+markers" if part is front else "markers",
                    name=name,
                    legendgroup=name,
                    showlegend=part is front,
                    visible="legendonly" if crowded and draft not in (leading, None) else True,
                    opacity=opacity,
                    line={"color": look.colour, "width": 2, "dash": "dot" if second else "solid"},
                    marker={
                        "color": look.colour, "size": size,
                        "line": {"color": look.colour if second else PAPER, "width": 1.2},
                        "symbol": look.symbol + ("-open" if second else ""),
                    },
                    text=[hover(result, t) for t in part],
                    hovertemplate="%{text}<extra></extra>",
                )  # fmt: skip
        if kind == "fixed":
            ends = (front[0], front[-1])
            fig.add_scatter(
                x=[t.metrics["discard_rate"] for t in ends],
                y=[t.metrics["verification_rate"] for t in ends],
                text=[f"\u2002K={t.configuration.drafter.policy.max_tokens}" for t in ends],
                mode="text", textposition="middle right", textfont={"size": 11, "color": MUTED},
                name=name, legendgroup=name, showlegend=False, hoverinfo="skip",
                visible="legendonly" if crowded and draft != leading else True,
            )  # fmt: skip
    if left_out:
        fig.layout.title.subtitle.text += (
            f" Of {len(trials)} configurations {left_out} that lie behind the fronts, close to "
            "others, are not drawn."
        )
    for oracle in result.oracles:
        fig.add_scatter(
            x=[0.0],
            y=[oracle.verification_rate],
            mode="markers",
            name=f"oracle · {oracle.draft}" if len(drafts) > 1 else "oracle",
            legendrank=1001,
            marker={
                "symbol": "star" if oracle.draft == leading else "star-open",
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
    # room for the speedups of the grey lines, and for a long legend
    fig.update_layout(margin_r=48, height=560 + 14 * max(0, len(groups) - CROWD))
    fig.update_xaxes(title_text="discard rate  N_discarded / N", range=[view.left, view.right])
    fig.update_yaxes(title_text="verification rate  N_target / N", range=[view.low, view.high])
    return fig


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


def hover(result: SweepResult, trial: Trial) -> str:
    m = trial.metrics
    kind = "measured" if speedup(result, trial).timing else "estimated"
    return "<br>".join([
        f"<b>{label(result, trial)}</b>{' (champion)' if trial.id == result.champion else ''}",
        f"speedup {speedup(result, trial).text} ({kind})",
        f"verification rate {m['verification_rate']:.3f}",
        f"discard rate {m['discard_rate']:.3f}",
        f"MAT {m['mat']:.2f} tokens per target forward",
        f"accepted / drafted {m['acceptance_rate']:.2f}",
    ])  # fmt: skip
