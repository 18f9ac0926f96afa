"""The trade-off that every drafting configuration makes: target forwards against wasted drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import plotly.graph_objects as go

from dashboards.look import MUTED, PAPER, base_figure, family_order, style
from dashboards.ranking import champion, draft_of, family, label, ranked, speedup
from specdec_core.cost import Profile, latency
from specdec_core.search.results import OraclePoint, SweepResult, Trial

CROWD = 10  # more fronts than this cannot be told apart


class FrontierView(NamedTuple):
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


def thin(
    trials: Sequence[Trial], view: FrontierView, most: int = 150, cells: int = 36
) -> list[Trial]:
    """The trials to draw: all, or, of more than `most`, one of each family in each cell of a grid
    over `view`."""
    if len(trials) <= most:
        return list(trials)
    kept: dict[tuple[str, int, int], Trial] = {}
    for trial in trials:
        across = (trial.metrics["discard_rate"] - view.left) / (view.right - view.left)
        up = (trial.metrics["verification_rate"] - view.low) / (view.high - view.low)
        kept.setdefault((family(trial), int(cells * across), int(cells * up)), trial)
    return list(kept.values())


Group = tuple[str, str | None]  # family and draft


@dataclass(frozen=True)
class _Scene:
    """What is drawn of a sweep, and how much of it at once."""

    result: SweepResult
    groups: dict[Group, list[Trial]]  # in the order of the legend
    fronts: dict[Group, list[Trial]]
    dominated: set[str]  # ids of the drawn trials that are on no front
    left_out: int  # how many more are not drawn
    leading: str | None  # the draft whose groups are drawn first
    crowded: bool  # the other drafts are hidden until clicked in the legend
    view: FrontierView

    @classmethod
    def of(cls, result: SweepResult) -> _Scene:
        best, drafts = champion(result), list(result.pair.drafts)
        leading = (draft_of(result, best) if best else None) or next(iter(drafts), None)
        trials = ranked(result)
        members: dict[Group, list[Trial]] = {}
        for trial in trials:
            members.setdefault((family(trial), draft_of(result, trial)), []).append(trial)

        def place(group: Group) -> tuple[int, tuple[int, str]]:
            kind, draft = group
            number = drafts.index(draft) if draft in drafts else len(drafts)
            return number - len(drafts) * (draft == leading), family_order(kind)

        groups = {group: members[group] for group in sorted(members, key=place)}
        crowded = len(groups) > CROWD
        first = [t for t in trials if not crowded or draft_of(result, t) in (leading, None)]
        view = _view(result, first)
        fronts = {group: pareto(trials) for group, trials in groups.items()}
        on_front = {trial.id for front in fronts.values() for trial in front}
        dominated = [t for t in trials if t.id not in on_front]
        shown = {t.id for t in thin(dominated, view)}
        left_out = len(dominated) - len(shown)
        return cls(result, groups, fronts, shown, left_out, leading, crowded, view)

    @property
    def several(self) -> bool:
        """Whether there are several drafts, so that names have to say which."""
        return len(self.result.pair.drafts) > 1

    def visible(self, draft: str | None) -> bool | str:
        return "legendonly" if self.crowded and draft not in (self.leading, None) else True


def frontier(result: SweepResult) -> go.Figure:
    """Verification rate against discard rate (SpecDec++, Fig. 3).

    One trace a family and draft, its Pareto frontier connected; the oracle of each draft
    (Theorem 4.1) at discard rate 0; behind them lines of equal latency (Eq. 5.1). Points behind
    the frontiers are faint, and thinned where there are hundreds. With many families, the traces
    of drafts other than the champion's are hidden until clicked in the legend.
    """
    scene, best = _Scene.of(result), champion(result)
    # room for the speedups of the grey lines, and for a long legend
    height = 560 + 14 * max(0, len(scene.groups) - CROWD)
    fig = base_figure(_title(result, best), _subtitle(scene), height).update_layout(margin_r=48)
    for draft in result.pair.drafts:
        fig.add_traces(_iso_lines(result, draft, scene.view, visible=draft == scene.leading))
    for group in scene.groups:
        fig.add_traces(_traces(scene, group))
    fig.add_traces([_oracle(scene, oracle) for oracle in result.oracles])
    if best is not None:
        fig.add_annotation(
            x=best.metrics["discard_rate"], y=best.metrics["verification_rate"],
            text=f"<b>champion</b> {speedup(result, best).value:.2f}×",
            showarrow=True, arrowcolor=MUTED, arrowwidth=1.2, arrowhead=2, standoff=7,
            bgcolor=PAPER, ax=36, ay=44,
        )  # fmt: skip
    view = scene.view
    fig.update_xaxes(title_text="discard rate  N_discarded / N", range=[view.left, view.right])
    fig.update_yaxes(title_text="verification rate  N_target / N", range=[view.low, view.high])
    return fig


def _title(result: SweepResult, best: Trial | None) -> str:
    if best is None:
        return "Verification rate against discard rate"
    return (
        f"{label(result, best)} runs the target {best.metrics['verification_rate']:.2f} times "
        f"and throws away {best.metrics['discard_rate']:.2f} draft tokens per output token"
    )


def _subtitle(scene: _Scene) -> str:
    text = (
        "Each point is one configuration; down and to the left is better, on any hardware. "
        "The line joins a family's best trade-offs, stars are the oracle, and on a grey line "
        "every chain of the draft is equally fast here."
    )
    if scene.left_out:
        text += (
            f" Of {sum(map(len, scene.groups.values()))} configurations {scene.left_out} that lie "
            "behind the fronts, close to others, are not drawn."
        )
    return text


def _traces(scene: _Scene, group: Group) -> list[go.Scatter]:
    """A group's front, the trials behind it, and, of fixed K, the K at the front's ends."""
    kind, draft = group
    front = scene.fronts[group]
    rest = [t for t in scene.groups[group] if t.id in scene.dominated]
    look = style(kind)
    name = f"{look.name} · {draft}" if draft and scene.several else look.name
    faint = 0.4 if len(scene.dominated) < 40 else 0.22
    traces = [_points(scene, front, name, group, 10 if len(front) < 25 else 7, joined=True)]
    if rest:
        traces.append(_points(scene, rest, name, group, 7, opacity=faint))
    if kind == "fixed":
        ends = (front[0], front[-1])
        lengths = go.Scatter(
            x=[t.metrics["discard_rate"] for t in ends],
            y=[t.metrics["verification_rate"] for t in ends],
            text=[f"\u2002K={t.configuration.policies[0][1].max_tokens}" for t in ends],
            mode="text",
            textposition="middle right",
            textfont={"size": 11, "color": MUTED},
            name=name,
            legendgroup=name,
            showlegend=False,
            hoverinfo="skip",
            visible=scene.visible(draft),
        )  # fmt: skip
        traces.append(lengths)
    return traces


def _points(
    scene: _Scene,
    trials: Sequence[Trial],
    name: str,
    group: Group,
    size: int,
    joined: bool = False,
    opacity: float = 1.0,
) -> go.Scatter:
    kind, draft = group
    look, second = style(kind), draft not in (scene.leading, None)
    return go.Scatter(
        x=[t.metrics["discard_rate"] for t in trials],
        y=[t.metrics["verification_rate"] for t in trials],
        mode="lines+markers" if joined else "markers",
        name=name, legendgroup=name, showlegend=joined, opacity=opacity,
        visible=scene.visible(draft),
        line={"color": look.colour, "width": 2, "dash": "dot" if second else "solid"},
        marker={
            "color": look.colour, "size": size,
            "line": {"color": look.colour if second else PAPER, "width": 1.2},
            "symbol": look.hollow if second else look.symbol,
        },
        text=[hover(scene.result, t) for t in trials],
        hovertemplate="%{text}<extra></extra>",
    )  # fmt: skip


def _oracle(scene: _Scene, oracle: OraclePoint) -> go.Scatter:
    return go.Scatter(
        x=[0.0], y=[oracle.verification_rate], mode="markers", legendrank=1001,
        name=f"oracle · {oracle.draft}" if scene.several else "oracle",
        marker={
            "symbol": "star" if oracle.draft == scene.leading else "star-open",
            "size": 14, "color": MUTED, "line": {"color": MUTED, "width": 1.5},
        },
        hovertemplate=f"<b>oracle of {oracle.draft}</b><br>discards nothing, verifies once a "
        f"disagreement<br>verification rate {oracle.verification_rate:.3f}<br>predicted "
        f"speedup {oracle.speedup:.2f}×<extra></extra>",
    )  # fmt: skip


def _view(result: SweepResult, trials: Sequence[Trial]) -> FrontierView:
    """Axis ranges that hold every point and leave room below for the champion's label."""
    x = [t.metrics["discard_rate"] for t in trials] or [1.0]
    y = [t.metrics["verification_rate"] for t in trials] + [
        o.verification_rate for o in result.oracles
    ] or [0.0, 1.0]
    width, height = max(max(x), 0.1), max(max(y) - min(y), 0.05)
    return FrontierView(
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


def _iso_lines(
    result: SweepResult, draft: str, view: FrontierView, visible: bool
) -> list[go.Scatter]:
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
