"""What forward passes take: measured alone, and inferred from the times of real rounds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboards.look import (
    DRAFT_COLOURS,
    MUTED,
    TARGET_COLOUR,
    base_figure,
    evenly,
    family_order,
    style,
)
from dashboards.ranking import draft_of, family
from specdec_core.cost import ForwardTimes, regress_forward_times
from specdec_core.search.results import SweepResult


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
    colours = [TARGET_COLOUR, *DRAFT_COLOURS]
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


# Names of the columns of :func:`generation_times` that Eq. 3.1 ties together.
PASSES, SECONDS = ["n_draft", "n_target"], "seconds"


def generation_times(result: SweepResult, rounds: pd.DataFrame) -> pd.DataFrame:
    """Passes and seconds of every generation that was really decoded: columns `family`, `draft`
    (None for drafters without a model), `n_draft`, `n_target`, `seconds` (without prefill, and so
    without the first round, which reads the prompt).

    `rounds` is the sweep's table of rounds; those that a replay counted took no time and are left
    out.
    """
    seconds = rounds[["draft_seconds", "target_seconds", "other_seconds"]].sum(axis=1)
    live = rounds.assign(seconds=seconds)[(rounds["target_seconds"] > 0) & (rounds["round"] > 0)]
    table = live.groupby(["config_id", "request_id"], sort=False).agg(
        n_draft=("draft_forwards", "sum"),
        n_target=("draft_forwards", "size"),
        seconds=("seconds", "sum"),
    )
    table = table.reset_index()
    trials = {t.id: t for t in result.trials}
    table = table[table["config_id"].isin(trials)]
    table.insert(1, "family", [family(trials[i]) for i in table["config_id"]])
    table.insert(2, "draft", [draft_of(result, trials[i]) for i in table["config_id"]])
    return table.reset_index(drop=True)


def regression_table(generations: pd.DataFrame) -> pd.DataFrame:
    """t_draft and t_target in ms by regression, and R² (SpecDec++, Table 2): a row for each draft
    and family, and one for all families of a draft. Settings whose generations are too alike to
    tell the two times apart are left out."""
    rows = []
    for draft, of_draft in generations.groupby("draft", sort=False, dropna=False):
        families = of_draft.groupby("family", sort=False)
        settings = [(style(str(kind)).name, part) for kind, part in families]
        if len(settings) > 1 and isinstance(draft, str):
            settings.append(("all", of_draft))
        for name, part in settings:
            try:
                times = regress_forward_times(part[[*PASSES, SECONDS]].itertuples(index=False))
            except ValueError:
                continue
            rows.append({
                "setting": name,
                "draft": draft if isinstance(draft, str) else "–",
                "t_draft (ms)": 1e3 * times.t_draft if part["n_draft"].any() else np.nan,
                "t_target (ms)": 1e3 * times.t_target,
                # equal counts leave no variance that they could explain
                "R²": times.r2 if len(part[PASSES].drop_duplicates()) > 1 else np.nan,
                "generations": len(part),
            })  # fmt: skip
    return pd.DataFrame(rows, columns=_TABLE_2)


_TABLE_2 = ["setting", "draft", "t_draft (ms)", "t_target (ms)", "R²", "generations"]


def time_regression(generations: pd.DataFrame, most: int = 600) -> go.Figure:
    """Predicted against measured seconds of every generation (SpecDec++, §5.2 and Table 2).

    One regression of T on N_draft and N_target (Eq. 3.1) for each draft, over all its
    configurations; drafters without a model by themselves. Of more than `most` generations as many
    are drawn, evenly spread; all are fitted.
    """
    fits: dict[str, ForwardTimes] = {}
    predicted = pd.Series(np.nan, index=generations.index)
    for draft, of_draft in generations.groupby("draft", sort=False, dropna=False):
        # t_target of wide and of single-token forwards differ: they are fitted apart
        families = [part for _, part in of_draft.groupby("family")]
        for part in [of_draft] if isinstance(draft, str) else families:
            try:
                times = regress_forward_times(part[[*PASSES, SECONDS]].itertuples(index=False))
            except ValueError:
                continue
            if isinstance(draft, str):
                fits[draft] = times
            predicted[part.index] = part[PASSES].to_numpy() @ [times.t_draft, times.t_target]
    first = next(iter(fits), None)
    title = "Measured seconds of a generation against the regression"
    if first is not None:
        times = fits[first]
        title = (
            f"t_draft {1e3 * times.t_draft:.2f} ms and t_target {1e3 * times.t_target:.2f} ms "
            + ("explain" if times.r2 >= 0.9 else "explain only in part")
            + f" how long generations with {first} take (R² {times.r2:.3f})"
        )
    fig = base_figure(
        title,
        "Each point is one generation that was really decoded: its measured time against "
        "t_draft·N_draft + t_target·N_target (Eq. 3.1) with the times that fit all of a draft's "
        "generations best. Vertical distance is what wider verifications, longer contexts and the "
        "machine's other work add.",
        500,
    )
    table = generations.assign(predicted=predicted).dropna(subset=["predicted"])
    shown = table.iloc[evenly(len(table), most)]
    if len(table):
        low, high = 1e3 * table[SECONDS].min(), 1e3 * table[SECONDS].max()
        fig.add_scatter(
            x=[low, high], y=[low, high], mode="lines", name="as predicted", hoverinfo="skip",
            line={"color": MUTED, "width": 1.2, "dash": "dash"},
        )  # fmt: skip
    drafts = list(fits)
    groups = [
        (draft if isinstance(draft, str) else None, str(kind), part)
        for (draft, kind), part in shown.groupby(["draft", "family"], sort=False, dropna=False)
    ]
    for name, kind, part in sorted(groups, key=lambda g: (g[0] or "", family_order(g[1]))):
        look = style(kind)
        fig.add_scatter(
            x=1e3 * part[SECONDS], y=1e3 * part["predicted"], mode="markers",
            name=f"{look.name} · {name}" if name and len(drafts) > 1 else look.name,
            customdata=part[PASSES],
            marker={
                "color": look.colour, "size": 7, "opacity": 0.65,
                "symbol": look.symbol + ("-open" if name in drafts[1:] else ""),
            },
            hovertemplate=f"<b>{look.name}</b><br>measured %{{x:.1f}}"
            " ms, predicted %{y:.1f} ms<br>N_draft %{customdata[0]}, N_target %{customdata[1]}"
            "<extra></extra>",
        )  # fmt: skip
    fig.update_xaxes(title_text="measured time of a generation (ms)")
    fig.update_yaxes(title_text="predicted (ms)")
    return fig
