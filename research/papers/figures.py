"""The figures of the papers' tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from dashboards.look import (
    DASHED,
    OTHER_COLOURS,
    base_figure,
    intervals,
    legend_beside,
    style,
)
from research.papers.plan import Method, Quantity, Table
from research.papers.result import PapersResult
from research.papers.svg import SvgBar, bars_svg


class Look(NamedTuple):
    """How a quantity is shown: heading, format and meaning."""

    heading: str
    form: str
    meaning: str


QUANTITIES: dict[Quantity, Look] = {
    "tokens_per_second": Look("tok/s", ".0f", "output tokens per second, prefill included"),
    "speedup": Look("ratio", ".2f×", "times as fast as autoregressive decoding"),
    "mat": Look("MAT", ".2f", "output tokens per target forward"),
    "accepted_per_round": Look("accepted", ".2f", "accepted tokens per target forward"),
    "acceptance_rate": Look("acc./drafted", ".1%", "accepted over drafted tokens"),
    "path_rate": Look("α", ".2f", "longest accepted path over maximum depth"),
    "utilisation": Look("Util", ".2f", "output tokens per draft forward (Post-use, Eq. 3)"),
    "discard_rate": Look("discard rate", ".3f", "thrown-away tokens per output token"),
    "verification_rate": Look("verific. rate", ".3f", "target forwards per output token"),
}
FRONTIER: tuple[Quantity, Quantity] = ("discard_rate", "verification_rate")
PATTERNS = ("", "/", ".", "x", "-", "+", "|", "\\")
DASHES = ("solid", "dash", "dot", "dashdot")


def paper_figure(result: PapersResult, key: str) -> go.Figure:
    """A table's ratio, else its first quantity, for every method that drafts: bars in a group for
    each prompt set, or lines over what the table varies; of a `frontier` table, both rates."""
    table = result.plan.tables[key]
    quantity: Quantity = "speedup" if "speedup" in table.columns else table.columns[0]
    heading, _, meaning = QUANTITIES[quantity]
    if quantity == "speedup":
        meaning += ", with its 95 % interval"
    fig = base_figure(table.title, f"{heading}: {meaning}", 440)
    methods = [m for m in result.plan.methods(key) if _known(result, table, m, quantity)]
    if table.frontier:
        return _frontier(fig, result, key)
    if table.heat and table.varied:
        return _heat(fig, result, table, methods, quantity)
    draw = _lines if table.varied else _bars
    for method, (colour, pattern) in zip(methods, _colours(methods), strict=True):
        draw(fig, result, table, method, quantity, colour, pattern)
    fig.update_layout(barmode="group", bargap=0.18, bargroupgap=0.06)
    fig.update_yaxes(title_text=heading, rangemode="tozero")
    if quantity == "speedup":
        fig.add_hline(y=1, line=DASHED)
    return legend_beside(fig)


def paper_svg(result: PapersResult, key: str) -> str:
    """The same values as an SVG file: a bar for each method, prompt set and value."""
    table = result.plan.tables[key]
    quantity: Quantity = "speedup" if "speedup" in table.columns else table.columns[0]
    heading, form, meaning = QUANTITIES[quantity]
    sets = result.sets_of(table)
    bars = []
    for method in result.plan.methods(key):
        for number, configuration in enumerate(method.configurations):
            for prompts in sets:
                value = result.value(prompts, configuration, quantity)
                if configuration.drafter is None or math.isnan(value):
                    continue
                parts = [method.label]
                parts += [f"{table.varied} = {table.values[number]}"] if table.varied else []
                parts += [prompts] if len(sets) > 1 else []
                measured = result.find(prompts, configuration)
                timing = measured.timing if measured and quantity == "speedup" else None
                ends = (timing.low, timing.high) if timing else (value, value)
                label = format(value, form.removesuffix("×")) + "×" * form.endswith("×")
                bars.append(SvgBar(", ".join(parts), prompts, value, *ends, label))
    colours = dict(zip(sets, OTHER_COLOURS, strict=False))
    one = quantity == "speedup"
    return bars_svg(table.title, f"{heading}: {meaning}", bars, colours, one)


def _known(result: PapersResult, table: Table, method: Method, quantity: Quantity) -> bool:
    return any(
        configuration.drafter is not None
        and not math.isnan(result.value(prompts, configuration, quantity))
        for prompts in result.sets_of(table)
        for configuration in method.configurations
    )


def _bars(
    fig: go.Figure,
    result: PapersResult,
    table: Table,
    method: Method,
    quantity: Quantity,
    colour: str,
    pattern: str,
) -> None:
    names = result.sets_of(table)
    (configuration,) = method.configurations
    points = [(name, configuration) for name in names]
    fig.add_bar(
        x=names,
        y=[result.value(*point, quantity) for point in points],
        error_y=_intervals(result, points, quantity),
        name=method.label,
        marker={"color": colour, "line": {"width": 0}, "pattern": {"shape": pattern}},
        hovertemplate=f"<b>{method.label}</b><br>%{{x}}: %{{y:.3f}}<br>{configuration.label}"
        "<extra></extra>",
    )


def _lines(
    fig: go.Figure,
    result: PapersResult,
    table: Table,
    method: Method,
    quantity: Quantity,
    colour: str,
    _: str,
) -> None:
    names = result.sets_of(table)
    symbol = style(method.configurations[0].family).symbol
    for number, name in enumerate(names):
        points = [(name, configuration) for configuration in method.configurations]
        fig.add_scatter(
            x=[*table.values],
            y=[result.value(*point, quantity) for point in points],
            error_y=_intervals(result, points, quantity),
            mode="lines+markers",
            name=method.label + (f", {name}" if len(names) > 1 else ""),
            line={"color": colour, "width": 2, "dash": DASHES[number % len(DASHES)]},
            marker={"symbol": symbol, "size": 9},
            hovertemplate=f"<b>{method.label}</b><br>{table.varied} = %{{x}}: %{{y:.3f}}"
            "<extra></extra>",
        )
    fig.update_xaxes(title_text=table.varied)


def _frontier(fig: go.Figure, result: PapersResult, key: str) -> go.Figure:
    """Verification over discard rates (SpecDec++, Fig. 3): a line for each prompt set and family of
    configurations, in the order of the table."""
    table = result.plan.tables[key]
    for number, prompts in enumerate(result.sets_of(table)):
        families: dict[str, list[Method]] = {}
        for method in result.plan.methods(key):
            configuration = method.configurations[0]
            if configuration.drafter is not None and result.find(prompts, configuration):
                families.setdefault(configuration.family, []).append(method)
        for family, methods in families.items():
            looks = style(family)
            x, y = (
                [result.value(prompts, m.configurations[0], rate) for m in methods]
                for rate in FRONTIER
            )
            fig.add_scatter(
                x=x,
                y=y,
                text=[method.label for method in methods],
                mode="lines+markers",
                name=f"{family}, {prompts}",
                line={"color": looks.colour, "width": 2, "dash": DASHES[number % len(DASHES)]},
                marker={"symbol": looks.symbol, "size": 9},
                hovertemplate="<b>%{text}</b><br>discarded %{x:.3f}, verifications %{y:.3f}"
                f"<br>{prompts}<extra></extra>",
            )
    x_title, y_title = (f"{QUANTITIES[q].heading}: {QUANTITIES[q].meaning}" for q in FRONTIER)
    fig.update_xaxes(title_text=x_title, rangemode="tozero")
    fig.update_yaxes(title_text=y_title, rangemode="tozero")
    return legend_beside(fig)


def _heat(
    fig: go.Figure,
    result: PapersResult,
    table: Table,
    methods: Sequence[Method],
    quantity: Quantity,
) -> go.Figure:
    """Methods down, values of the varied parameter across, of the first prompt set."""
    prompts = result.sets_of(table)[0]
    values = [[result.value(prompts, c, quantity) for c in m.configurations] for m in methods]
    fig.add_heatmap(
        x=[str(value) for value in table.values],
        y=[method.name for method in methods],
        z=values,
        colorscale="Blues",
        texttemplate="%{z:.2f}",
        hovertemplate=f"%{{y}}, {table.varied} = %{{x}}: %{{z:.3f}}<extra></extra>",
        colorbar={"title": QUANTITIES[quantity].heading},
    )
    fig.update_xaxes(title_text=table.varied)
    return fig


def _intervals(
    result: PapersResult, points: Sequence[tuple[str, Any]], quantity: Quantity
) -> dict[str, Any] | None:
    if quantity != "speedup":
        return None
    measured = [result.find(*point) for point in points]
    timings = [m.timing if m else None for m in measured]
    ends = [(t.speedup, t.low, t.high) if t else (0.0, 0.0, 0.0) for t in timings]
    return intervals(*zip(*ends, strict=True))


def _colours(methods: Sequence[Method]) -> list[tuple[str, str]]:
    """A colour and a pattern for each method: its family's colour or, where that is taken, a spare
    one; where none is left, a pattern tells them apart."""
    spare = iter(OTHER_COLOURS)
    looks: list[tuple[str, str]] = []
    for method in methods:
        family = style(method.configurations[0].family).colour
        colour = family if (family, "") not in looks else next(spare, family)
        taken = [pattern for used, pattern in looks if used == colour]
        looks.append((colour, PATTERNS[len(taken) % len(PATTERNS)]))
    return looks
