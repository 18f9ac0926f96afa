"""A schedule, and the simulations that it was chosen from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from dashboards import cells
from dashboards.reports.sentences import sentences
from dashboards.sections import Origin, Report, Section
from specdec_core.config import Configuration, distinct_labels
from specdec_core.search.load.schedule import Schedule

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
    schedule: Schedule,
    simulated: pd.DataFrame,
    configurations: Sequence[Configuration],
    by: str,
    origin: Origin,
) -> Report:
    """The schedule in a sentence and by number of clients. The first of `configurations` is the
    baseline."""
    labels = distinct_labels(configurations)
    rows = _rows(schedule, simulated, configurations, labels, by)
    used = [each.configuration for each in schedule.ranges]
    return Report(
        command="schedule",
        title="A configuration for each range of load",
        origin=origin,
        findings=[f"{schedule.sentence}."],
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
    schedule: Schedule,
    simulated: pd.DataFrame,
    configurations: Sequence[Configuration],
    labels: dict[str, str],
    by: str,
) -> list[dict[str, Any]]:
    by_load = simulated.set_index(["clients", "config_id"])
    fewest = simulated["clients"].min()
    best_alone = str(by_load.loc[fewest, by].idxmax())
    rows = []
    for clients in simulated["clients"].unique().tolist():
        chosen = schedule.at(clients)
        row = by_load.loc[(clients, chosen.id)].to_dict()
        each = by_load.loc[clients, "tokens_per_second"]
        rows.append(
            {
                "clients": clients,
                "scheduled": labels[chosen.id],
                **row,
                "speedup": row["tokens_per_second"] / each[configurations[0].id],
                "over_one": row["tokens_per_second"] / each[best_alone],
            }
        )
    return rows
