"""A configuration that follows the load, and the simulations that it was chosen from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dashboards import cells
from dashboards.reports.sentences import sentences
from dashboards.sections import Origin, Report, Section
from specdec_core.config import Configuration, distinct_labels
from specdec_core.search.load.schedule import drafter_at

COLUMNS = {
    "clients": cells.text("clients"),
    "scheduled": cells.text("scheduled"),
    "tokens/s": cells.number("tokens_per_second", ",.0f"),
    "over autoregressive": cells.number("speedup", ".2f×"),
    "over the best for one client": cells.number("over_one", ".2f×"),
    "TTFT p50, ms": cells.milliseconds("ttft"),
    "TPOT p50, ms": cells.milliseconds("tpot"),
}
GOODPUT = {"good requests/s": cells.number("goodput", ",.2f")}


def report(
    chosen: Configuration,
    simulated: pd.DataFrame,
    configurations: Sequence[Configuration],
    by: str,
    origin: Origin,
) -> Report:
    """What was chosen among `configurations`, the first of which is the baseline, in a sentence and
    by number of clients. `simulated` has a row of it for each."""
    labels = distinct_labels(configurations)
    rows = _rows(chosen, simulated, configurations, labels, by)
    names = {row["scheduled"] for row in rows}
    used = [each for each in configurations if labels[each.id] in names]
    return Report(
        command="schedule",
        title="A configuration for each range of load",
        origin=origin,
        findings=[chosen.sentence],
        parts=[
            Section(
                key="schedule",
                title="The schedule, simulated",
                shown=cells.table(rows, COLUMNS | (GOODPUT if by == "goodput" else {})),
            ),
            sentences((labels[each.id], each) for each in used),
        ],
        frames={"simulated": simulated},
        run_name=f"schedule {origin.name}",
        metrics={
            f"clients_{row['clients']}.{name}": float(row[name])
            for row in rows
            for name in ("tokens_per_second", "speedup", "goodput")
        },
        tags={"counted": "replay"},
    )


def _rows(
    chosen: Configuration,
    simulated: pd.DataFrame,
    configurations: Sequence[Configuration],
    labels: dict[str, str],
    by: str,
) -> list[dict[str, Any]]:
    by_load = simulated.set_index(["clients", "config_id"])
    fewest = simulated["clients"].min()
    best_alone = str(by_load.loc[fewest, by][[each.id for each in configurations]].idxmax())
    by_drafter = {each.drafter: labels[each.id] for each in configurations}
    rows = []
    for clients in simulated["clients"].unique().tolist():
        row = by_load.loc[(clients, chosen.id)].to_dict()
        each = by_load.loc[clients, "tokens_per_second"]
        rows.append(
            {
                "clients": clients,
                "scheduled": by_drafter[drafter_at(chosen, clients)],
                **row,
                "speedup": row["tokens_per_second"] / each[configurations[0].id],
                "over_one": row["tokens_per_second"] / each[best_alone],
            }
        )
    return rows
