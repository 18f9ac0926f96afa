"""How speculative decoding fares along a long text."""

from __future__ import annotations

import pandas as pd

from dashboards import cells
from dashboards.reports.sentences import sentences
from dashboards.sections import Report, ReportOrigin, Section, metric_name
from research.long_form.figures import along_figure, entropy_figure
from research.long_form.study import LongForm
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
                figure=along_figure(table, "Speed by context"),
                ruled=cells.group_ends(table["up_to"]),
            ),
            Section(
                key="entropy",
                title="Entropy by context",
                note="SVIP stops drafting where the draft model's entropy is high.",
                shown=cells.table(entropies, ENTROPIES),
                frame=entropies,
                figure=entropy_figure(entropies, "Entropy by context"),
                ruled=cells.group_ends(entropies["up_to"]),
            ),
            sentences(zip(result.labels, result.configurations, strict=True)),
        ],
        frames={"rounds": result.rounds},
        metrics=_metrics(table, entropies),
    )


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
