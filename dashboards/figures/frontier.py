"""The trade-off that every drafting configuration makes: target forwards against wasted drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from dashboards.look import MUTED, PAPER, base_figure, evenly, family_order, style
from dashboards.ranking import champion, draft_of, family, ranked, speedup
from specdec_core.cost import Profile
from specdec_core.search.results import SweepResult, Trial

CROWD = 10  # groups; with more, only the groups of the champion's draft are shown at first
MOST = 150  # trials that are drawn behind the fronts, evenly spread over their ranking

Group = tuple[str, str | None]  # family and draft
Range = tuple[float, float]  # of an axis


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that no other beats in both rates, by rising discard rate."""
    front: list[Trial] = []
    for trial in sorted(trials, key=_rates):
        if not front or _rates(trial)[1] < _rates(front[-1])[1]:
            front.append(trial)
    return front


def frontier(result: SweepResult) -> go.Figure:
    """Verification rate against discard rate (SpecDec++, Fig. 3).

    One trace a family and draft, its Pareto frontier connected; the oracle of each draft
    (Theorem 4.1) at discard rate 0; behind them lines of equal latency (Eq. 5.1). Points behind
    the frontiers are faint, and thinned where there are hundreds. With many families, the traces
    of drafts other than the champion's are hidden until clicked in the legend.
    """
    best, drafts, trials = champion(result), list(result.pair.drafts), ranked(result)
    leading = (draft_of(result, best) if best else None) or next(iter(drafts), None)
    groups = _groups(result, leading)
    hidden = set(drafts) - {leading} if len(groups) > CROWD else set()
    xs, ys = _ranges(result, [t for t in trials if draft_of(result, t) not in hidden])
    fronts = {group: pareto(members) for group, members in groups.items()}
    on_front = {trial.id for front in fronts.values() for trial in front}
    behind = [trial for trial in trials if trial.id not in on_front]
    drawn = {behind[place].id for place in evenly(len(behind), MOST)}

    height = 560 + 14 * max(0, len(groups) - CROWD)  # room for a long legend
    subtitle = _subtitle(len(trials), len(behind) - len(drawn))
    fig = base_figure(_title(result, best), subtitle, height)
    if leading is not None:
        fig.add_trace(_equal_latency(result.profile, leading, xs, ys))
    for (kind, draft), members in groups.items():
        look, second = style(kind), draft not in (leading, None)
        name = f"{look.name} · {draft}" if draft and len(drafts) > 1 else look.name
        rest = [trial for trial in members if trial.id in drawn]
        for part, joined in ((fronts[kind, draft], True), (rest, False)):
            if not part:
                continue
            fig.add_scatter(
                x=[_rates(t)[0] for t in part], y=[_rates(t)[1] for t in part],
                mode="lines+markers" if joined else "markers",
                name=name, legendgroup=name, showlegend=joined,
                opacity=1.0 if joined else 0.4 if len(drawn) < 40 else 0.22,
                visible="legendonly" if draft in hidden else True,
                line={"color": look.colour, "width": 2, "dash": "dot" if second else "solid"},
                marker={
                    "color": look.colour, "size": 10 if joined and len(part) < 25 else 7,
                    "line": {"color": look.colour if second else PAPER, "width": 1.2},
                    "symbol": look.hollow if second else look.symbol,
                },
                text=[hover(result, t) for t in part], hovertemplate="%{text}<extra></extra>",
            )  # fmt: skip
    for oracle in result.oracles:
        fig.add_scatter(
            x=[0.0], y=[oracle.verification_rate], mode="markers", legendrank=1001,
            name=f"oracle · {oracle.draft}" if len(drafts) > 1 else "oracle",
            marker={
                "symbol": "star" if oracle.draft == leading else "star-open",
                "size": 14, "color": MUTED, "line": {"color": MUTED, "width": 1.5},
            },
            hovertemplate=f"<b>oracle of {oracle.draft}</b><br>discards nothing, verifies once a "
            f"disagreement<br>verification rate {oracle.verification_rate:.3f}<br>predicted "
            f"speedup {oracle.speedup:.2f}×<extra></extra>",
        )  # fmt: skip
    if best is not None:
        discard, verification = _rates(best)
        fig.add_annotation(
            x=discard, y=verification, text=f"<b>champion</b> {speedup(result, best).value:.2f}×",
            showarrow=True, arrowcolor=MUTED, arrowwidth=1.2, arrowhead=2, standoff=7,
            bgcolor=PAPER, ax=36, ay=44,
        )  # fmt: skip
    fig.update_xaxes(title_text="discard rate  N_discarded / N", range=xs)
    fig.update_yaxes(title_text="verification rate  N_target / N", range=ys)
    return fig


def _rates(trial: Trial) -> tuple[float, float]:
    return trial.metrics["discard_rate"], trial.metrics["verification_rate"]


def _groups(result: SweepResult, leading: str | None) -> dict[Group, list[Trial]]:
    """The trials by family and draft, in the order of the legend: the leading draft first."""
    members: dict[Group, list[Trial]] = {}
    for trial in ranked(result):
        members.setdefault((family(trial), draft_of(result, trial)), []).append(trial)
    drafts = [leading, *(draft for draft in result.pair.drafts if draft != leading), None]
    order = sorted(members, key=lambda group: (drafts.index(group[1]), family_order(group[0])))
    return {group: members[group] for group in order}


def _ranges(result: SweepResult, trials: Sequence[Trial]) -> tuple[Range, Range]:
    """Ranges of both axes that hold every point and leave room below for the champion's label."""
    x = [_rates(t)[0] for t in trials] or [1.0]
    y = [_rates(t)[1] for t in trials] + [o.verification_rate for o in result.oracles] or [0.0, 1.0]
    width, height = max(max(x), 0.1), max(max(y) - min(y), 0.05)
    low, high = max(0.0, min(y) - 0.16 * height), max(y) + 0.06 * height
    return (-0.03 * width, 1.05 * width), (low, high)


def _title(result: SweepResult, best: Trial | None) -> str:
    if best is None:
        return "Verification rate against discard rate"
    discard, verification = _rates(best)
    return (
        f"{result.labels[best.id]} runs the target {verification:.2f} times and throws away "
        f"{discard:.2f} draft tokens per output token"
    )


def _subtitle(count: int, left_out: int) -> str:
    text = (
        "Each point is one configuration. Of one draft's chains, those further down and to the left"
        " are faster on any hardware. "
        "The line joins a family's best trade-offs, stars are the oracle, and on a grey line "
        "every chain of the draft has the same speedup here."
    )
    if left_out:
        text += f" Of {count} configurations {left_out} that lie behind the fronts are not drawn."
    return text


def chain_speedup(
    profile: Profile, draft: str, discard: np.ndarray, verification: np.ndarray
) -> np.ndarray:
    """Speedup over autoregressive decoding of a chain with these rates (Eq. 5.1). Here t_draft is
    the time of drafting a candidate and of verifying it, and t_target that of a round without
    candidates: the profile's target cost is affine in the width, so this is the estimate."""
    per_candidate = profile.t_target(3) - profile.t_target(2)
    t_draft = profile.t_draft(draft) + per_candidate
    t_target = profile.t_target(2) - per_candidate + profile.round_overhead
    seconds = t_draft + t_draft * discard + (t_target - t_draft) * verification
    return profile.autoregressive_seconds(1) / seconds


def _equal_latency(profile: Profile, draft: str, xs: Range, ys: Range) -> go.Contour:
    """Lines of equal speedup of the draft's chains, labelled."""
    x, y = np.linspace(*xs, 40), np.linspace(*ys, 40)
    return go.Contour(
        x=x, y=y, z=chain_speedup(profile, draft, *np.meshgrid(x, y)), name="equal latency",
        contours={
            "coloring": "none", "showlabels": True, "labelformat": ".3~g",
            "labelfont": {"size": 11, "color": MUTED},
        },
        ncontours=10, line={"color": "rgba(128,134,145,0.42)", "width": 1}, showscale=False,
        hoverinfo="skip", showlegend=True, legendrank=1002,
    )  # fmt: skip


def hover(result: SweepResult, trial: Trial) -> str:
    """What a configuration's point or bar says when it is pointed at."""
    m, gain = trial.metrics, speedup(result, trial)
    told, timing = f"≈ {gain.value:.2f}× (estimated)", gain.timing
    if timing is not None:
        told = f"{gain.value:.2f}× [{timing.low:.2f}, {timing.high:.2f}] (measured)"
    return "<br>".join([
        f"<b>{result.labels[trial.id]}</b>{' (champion)' if trial.id == result.champion else ''}",
        f"speedup {told}",
        f"verification rate {m['verification_rate']:.3f}",
        f"discard rate {m['discard_rate']:.3f}",
        f"MAT {m['mat']:.2f} tokens per target forward",
        f"accepted / drafted {m['acceptance_rate']:.2f}",
    ])  # fmt: skip
