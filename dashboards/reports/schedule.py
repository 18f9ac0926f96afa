"""A configuration that follows the load, and what it was chosen from."""

from __future__ import annotations

import pandas as pd

from dashboards.reports.load_choice import findings, load_metrics, load_sentences, loads, simulation
from dashboards.sections import Origin, Report
from specdec_core.search.load.result import LoadChoice


def report(choice: LoadChoice, simulated: pd.DataFrame, origin: Origin) -> Report:
    """`simulated` is what :func:`specdec_core.search.load.schedule.simulate_each` returned."""
    return Report(
        command="schedule",
        title="A configuration for each range of load",
        origin=origin,
        findings=findings(choice),
        parts=[loads(choice), *simulation(choice), load_sentences(choice)],
        frames={"simulated": simulated},
        run_name=f"schedule {origin.name}",
        metrics=load_metrics(choice),
        tags={"counted": "live" if choice.timed else "replay"},
    )
