"""How speculative decoding fares along a long text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import pandas as pd

from dashboards import cells
from dashboards.look import ARM_COLOURS, DRAFT_COLOURS, TARGET_COLOUR
from dashboards.reports.sentences import sentences
from dashboards.sections import Report, ReportOrigin, Section, metric_name
from research.long_form.study import LongForm
from research.svg import SvgLine, lines_svg
from specdec_core.tokens.statistics import Ratio

COLUMNS = {
    "context up to": cells.count("up_to"),
    "configuration": cells.text("configuration"),
    "over autoregressive": cells.ratio("speedup", "low", "high"),
    "from the beginning": cells.ratio("so_far", "so_far_low", "so_far_high"),
    "MAT": cells.number("mat", ".2f"),
    "candidates": cells.number("drafted", ".1f"),
    "accepted": cells.number("acceptance", ".0%"),
    "ms a token": cells.milliseconds("seconds_per_token"),
    "rest, ms": cells.milliseconds("rest_seconds"),
}
ENTROPIES = {
    "context up to": cells.count("up_to"),
    "model": cells.text("model"),
    "tokens": cells.count("tokens"),
    "mean, nats": cells.number("mean", ".2f"),
    "lower quartile": cells.number("low", ".2f"),
    "median": cells.number("median", ".2f"),
    "upper quartile": cells.number("high", ".2f"),
}
METRICS = ("speedup", "so_far", "mat", "acceptance", "seconds_per_token", "rest_seconds")


def report(result: LongForm, origin: ReportOrigin) -> Report:
    table, entropies = result.table(), result.entropy_table()
    return Report(
        command="long-form",
        title=f"Long texts of {origin.pair}",
        origin=origin,
        findings=findings(table),
        parts=[
            Section(
                key="along",
                title="Speed by context",
                note="A round belongs to the range that it began in. `rest` is what a round takes"
                " beyond both models' forwards: it must not grow with the context.",
                shown=cells.table(table, COLUMNS),
                frame=table,
                svg=lines_svg(
                    "Speed by context",
                    "over autoregressive decoding in the same range, with 95 % intervals",
                    _lines(table, "configuration", "speedup", ARM_COLOURS, drawn_from=1),
                    ("context up to, tokens", "times as fast"),
                ),
                ruled=cells.group_ends(table["up_to"]),
            ),
            Section(
                key="entropy",
                title="Entropy by context",
                note="SVIP stops drafting where the draft model's entropy is high.",
                shown=cells.table(entropies, ENTROPIES),
                frame=entropies,
                svg=lines_svg(
                    "Entropy by context",
                    "median of the target's own new tokens, with the middle half of the tokens",
                    _lines(entropies, "model", "median", [TARGET_COLOUR, *DRAFT_COLOURS]),
                    ("context up to, tokens", "nats"),
                ),
                ruled=cells.group_ends(entropies["up_to"]),
            ),
            sentences(zip(result.labels, result.configurations, strict=True)),
        ],
        frames={"rounds": result.rounds},
        metrics=_metrics(table, entropies),
    )


def _lines(
    table: pd.DataFrame, of: str, y: str, colours: Sequence[str], drawn_from: int = 0
) -> list[SvgLine]:
    """Column `y` over context with its interval, a line for each value of column `of` but for the
    first `drawn_from` of them."""
    names = list(dict.fromkeys(table[of]))[drawn_from:]
    return [
        SvgLine.of(name, colour, table[table[of] == name], "up_to", y, ends=("low", "high"))
        for name, colour in zip(names, cycle(colours), strict=False)
    ]


def findings(table: pd.DataFrame) -> list[str]:
    """The fastest configuration of each range, and what becomes of it to the end of the text."""
    lines = []
    for edge, rows in table.groupby("up_to"):
        others = rows[rows["configuration"] != table["configuration"].iloc[0]]
        if others.empty:
            continue
        best = others.loc[others["speedup"].idxmax()]
        ratio = Ratio(best["speedup"], best["low"], best["high"])
        lines.append(
            f"up to {edge:,} tokens: {best['configuration']} {cells.of_ratio(ratio)},"
            f" {best['mat']:.2f} tokens a forward"
        )
    return lines


def _metrics(table: pd.DataFrame, entropies: pd.DataFrame) -> dict[str, dict[int, float]]:
    """Each number by the end of its range, as a step."""
    metrics: dict[str, dict[int, float]] = {}
    for row in table.to_dict("records"):
        for name in METRICS:
            if not cells.unknown(row[name]):
                key = metric_name(row["configuration"], name)
                metrics.setdefault(key, {})[row["up_to"]] = row[name]
    for row in entropies.to_dict("records"):
        metrics.setdefault(metric_name("entropy", row["model"]), {})[row["up_to"]] = row["mean"]
    return metrics
