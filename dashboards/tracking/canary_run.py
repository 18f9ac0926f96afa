"""What became of a challenger that had a share of the traffic, as a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlflow.entities import Metric, Param, RunTag

from dashboards.store import connect, experiment_id_of


def log_canary(pair: str, champion: str, state: Mapping[str, Any]) -> str:
    """Log the decision about a challenger (`canary` in a server's /health) against the `champion`
    of this id, in the pair's experiment; returns the run's id."""
    client = connect()
    experiment = experiment_id_of(client, pair)
    run = client.create_run(experiment, run_name=f"canary {state['label']}")
    numbers = {name: state[name] for name in ("pairs", "ratio", "low", "high")}
    params = {"champion": champion, "challenger": state["configuration"], "share": state["share"]}
    tags = {"kind": "canary", "state": state["state"], "reason": state["reason"]}
    client.log_batch(
        run.info.run_id,
        metrics=[
            Metric(f"canary.{name}", float(value), run.info.start_time, 0)
            for name, value in numbers.items()
            if value is not None
        ],
        params=[Param(name, str(value)) for name, value in params.items()],
        tags=[RunTag(name, value) for name, value in tags.items()],
    )
    client.set_terminated(run.info.run_id)
    return str(run.info.run_id)
