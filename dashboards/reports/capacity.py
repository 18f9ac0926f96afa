"""How many replicas a load needs, or what load they carry, and how well the simulation does."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from dashboards import cells
from dashboards.cells import Cell
from dashboards.figures.load_check import agreement_figure
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
    "router busy": cells.number("router_busy", ".0%"),
    "messages/s": cells.count("messages"),
}


def _compared(clients: bool) -> dict[str, Cell]:
    """Columns of live and simulated measures, with so many clients or at rates."""
    ttft, heading = ("ttft", "TTFT p50, ms") if clients else ("ttft_p95", "TTFT p95, ms")
    loads = {
        "share": cells.number("share", ".0%"),
        "requests/s": cells.number("rate", ".2f"),
    }
    return {
        **({"clients": cells.text("clients")} if clients else loads),
        "configuration": cells.text("configuration"),
        "tokens/s": cells.number("tokens_per_second", ".0f"),
        "simulated": cells.number("tokens_per_second_simulated", ".0f"),
        "off by": cells.number("tokens_per_second_error", "+.0%"),
        "TPOT p50, ms": cells.milliseconds("tpot"),
        "simulated ": cells.milliseconds("tpot_simulated"),
        "off by ": cells.number("tpot_error", "+.0%"),
        heading: cells.milliseconds(ttft),
        "simulated  ": cells.milliseconds(f"{ttft}_simulated"),
        "off by  ": cells.number(f"{ttft}_error", "+.0%"),
    }


def report(
    results: Sequence[Capacity],
    checked: Sequence[pd.DataFrame],
    configuration: Configuration,
    origin: ReportOrigin,
) -> Report:
    """What was found, everything that was simulated, and what was checked live: nothing, or with
    clients and at rates, the tables of :mod:`specdec_core.search.load.check`."""
    frame = pd.concat([result.frame() for result in results], ignore_index=True)
    chosen = [result.chosen for result in results]
    shown = [each for each in chosen if each is not None]
    parts = [] if frame.empty else [_tried(results)]
    parts += _checked(*checked) if checked else []
    return Report(
        command="capacity",
        title="Replicas and load, simulated",
        origin=origin,
        findings=[*map(found_line, results), *map(latencies, shown)],
        parts=[*parts, sentences([(configuration.label, configuration)])],
        frames={"tried": frame, **dict(zip(("checked", "checked_rates"), checked, strict=False))},
        run_name=f"capacity {origin.name}",
        metrics={
            f"replicas_{each.replicas}.{name}": float(value)
            for each in shown
            for name, value in each.row.items()
        },
        tags={"counted": "replay"},
    )


def found_line(result: Capacity) -> str:
    """What a search found, or why it found nothing."""
    limits, alone, wanted = result.slo, result.alone.measures, f"{result.share:.0%}"
    if result.chosen is not None:
        found = result.chosen
        held_up = " The router is the bottleneck." if found.router_busy > 0.9 else ""
        return (
            f"{_replicas(found)}: {found.rate:,.1f} requests a second,"
            f" {found.measures.good_share:.1%} of them with {limits}.{held_up}"
        )
    if alone.good_share < result.share:
        return (
            f"{limits} cannot be kept for {wanted} of the requests with any number of replicas:"
            f" alone on a replica, {alone.good_share:.0%} keep it ({limited(alone, limits)})"
        )
    return (
        f"{limits} cannot be kept for {wanted} of the requests with any number of replicas: they"
        f" wait too long for the router, which is {result.tried[-1].router_busy:.0%} busy (several:"
        " --routers)"
    )


def latencies(found: Tried) -> str:
    """The percentiles of what was found."""
    measures = found.measures

    def percentiles(name: str) -> str:
        values = [f"{1e3 * measures.value(name, p):.0f}" for p in (50, 95, 99)]
        return f"{' / '.join(values)} ms"

    return (
        f"{_replicas(found)}: TTFT {percentiles('ttft')}, TPOT {percentiles('tpot')} (median, 95th"
        f" and 99th percentile); replicas {found.busy:.0%} busy"
    )


def _replicas(found: Tried) -> str:
    return f"{found.replicas:,} replica" + ("" if found.replicas == 1 else "s")


def _tried(results: Sequence[Capacity]) -> Section:
    frames = [result.frame() for result in results]
    frame = pd.concat(frames, ignore_index=True)
    rows = frame.to_dict("records")
    found = {
        (result.chosen.replicas, result.chosen.rate)
        for result in results
        if result.chosen is not None
    }
    return Section(
        key="tried",
        title="What was simulated",
        note="The marked rows are the answer. Replicas whose queue grows as long as requests come"
        " are none, even within the limits. A message is an addition to an answer, which a server"
        " passes on to its client. Simulated"
        f" {min(result.pace for result in results):,.0f} times as fast as replicas decode.",
        shown=cells.table(frame, COLUMNS),
        marked=[n for n, row in enumerate(rows) if (row["replicas"], row["rate"]) in found],
        ruled=cells.group_ends(row["replicas"] for row in rows) if len(results) > 1 else (),
        brief=[*COLUMNS][:9],
    )


def _checked(clients: pd.DataFrame, rates: pd.DataFrame) -> list[Section]:
    return [
        Section(
            key="checked",
            title="Live and simulated",
            note="The same requests, by so many clients that each wait for their answer, decoded by"
            " the live engine and simulated, with step times that were measured in turns with the"
            " live runs.",
            shown=cells.table(clients, _compared(clients=True)),
            ruled=cells.group_ends(clients["clients"]),
        ),
        Section(
            key="checked_rates",
            title="Live and simulated, at rates",
            note=f"{rates['requests'].max()} requests that come at random, at a share of the rate"
            " that all slots together answered live, at the same times for both. The figure has"
            " every comparison, circles with clients (median TTFT), diamonds at rates (95th"
            " percentile): on the dashed line the simulation is right.",
            shown=cells.table(rates, _compared(clients=False)),
            figure=agreement_figure(clients, rates),
            ruled=cells.group_ends(rates["configuration"]),
        ),
    ]
