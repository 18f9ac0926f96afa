"""How many replicas a load needs, or what load they carry."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from dashboards import cells
from dashboards.reports.sentences import limited, sentences
from dashboards.sections import Report, ReportOrigin, Section
from specdec_core.config import Configuration
from specdec_core.search.load.capacity import Capacity, Tried

COLUMNS = {
    "replicas": cells.count("replicas"),
    "requests/s": cells.number("rate", ",.1f"),
    "within the limits": cells.number("good_share", ".1%"),
    "TTFT p50, ms": cells.milliseconds("ttft_p50"),
    "p95": cells.milliseconds("ttft_p95"),
    "p99": cells.milliseconds("ttft_p99"),
    "TPOT p50, ms": cells.milliseconds("tpot_p50"),
    "p95 ": cells.milliseconds("tpot_p95"),
    "p99 ": cells.milliseconds("tpot_p99"),
    "tokens/s": cells.count("tokens_per_second"),
    "replicas busy": cells.number("busy", ".0%"),
}


def report(
    results: Sequence[Capacity],
    configuration: Configuration,
    origin: ReportOrigin,
    live: bool = False,
) -> Report:
    """What was found, and everything that was simulated; `live`: of rounds that were decoded."""
    frame = pd.concat([result.frame() for result in results], ignore_index=True)
    shown = [result.chosen for result in results if result.chosen is not None]
    parts = [] if frame.empty else [_tried(results, frame)]
    return Report(
        command="capacity",
        title="Replicas and load, simulated",
        origin=origin,
        findings=[*map(found_line, results), *map(latencies, shown)],
        parts=[
            *parts,
            sentences([(configuration.label, configuration)]),
        ],
        metrics={
            f"replicas_{each.replicas}.{name}": float(value)
            for each in shown
            for name, value in each.row.items()
        },
        tags={"counted": "live" if live else "replay"},
    )


def found_line(result: Capacity) -> str:
    """What a search found, or why it found nothing."""
    limits, alone = result.slo, result.alone.measures
    if result.chosen is not None:
        found = result.chosen
        return (
            f"{_replicas(found)}: {found.rate:,.1f} requests a second,"
            f" {found.measures.good_share:.1%} of them with {limits}."
        )
    kept = f"alone on a replica, {alone.good_share:.0%} keep it ({limited(alone, limits)})"
    if result.possible:
        return f"{limits}: {kept}, but at nothing that was simulated {result.share:.0%} do"
    return (
        f"{limits} cannot be kept for {result.share:.0%} of the requests with any number of"
        f" replicas: {kept}"
    )


def latencies(found: Tried) -> str:
    """The percentiles of what was found."""

    def percentiles(name: str) -> str:
        values = [f"{1e3 * found.measures.value(name, p):.0f}" for p in (50, 95, 99)]
        return f"{' / '.join(values)} ms"

    return (
        f"{_replicas(found)}: TTFT {percentiles('ttft')}, TPOT {percentiles('tpot')} (median, 95th"
        f" and 99th percentile); replicas {found.busy:.0%} busy"
    )


def _replicas(found: Tried) -> str:
    return f"{found.replicas:,} replica" + ("" if found.replicas == 1 else "s")


def _tried(results: Sequence[Capacity], frame: pd.DataFrame) -> Section:
    rows = list(zip(frame["replicas"], frame["rate"], strict=True))
    found = [(r.chosen.replicas, r.chosen.rate) for r in results if r.chosen is not None]
    return Section(
        key="tried",
        title="What was simulated",
        note="The marked rows are the answer. A number of replicas whose queue grows while requests"
        " arrive is no answer, even within the limits. Simulated"
        f" {min(result.pace for result in results):,.0f} times as fast as replicas decode.",
        frame=frame,
        shown=cells.table(frame, COLUMNS),
        marked=[n for n, row in enumerate(rows) if row in found],
        ruled=cells.group_ends(frame["replicas"]) if len(results) > 1 else (),
        brief=[*COLUMNS][:9],
    )
