"""The end of a canary as a run of its pair's experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dashboards.outputs.mlflow_runs import log_run
from dashboards.sections import LoggedRun
from dashboards.store import connect, experiment_id_of


def log_canary(pair: str, champion: str, state: Mapping[str, Any]) -> str:
    """Log the decision about a challenger (`canary` in a server's /health) against the `champion`
    of this id, in the pair's experiment; returns the run's id."""
    numbers = {f"canary.{name}": state[name] for name in ("pairs", "ratio", "low", "high")}
    run = LoggedRun(
        name=f"canary {state['label']}",
        params={
            "champion": champion,
            "challenger": state["configuration"],
            "share": state["share"],
        },
        metrics={name: float(value) for name, value in numbers.items() if value is not None},
        tags={"kind": "canary", "state": state["state"], "reason": state["reason"]},
    )
    client = connect()
    return log_run(client, experiment_id_of(client, pair), run)
