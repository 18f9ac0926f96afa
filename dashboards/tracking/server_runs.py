"""What a server has done, as runs of its pair's experiment: its traffic, the end of a canary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric

from dashboards.outputs.mlflow_runs import delivering, log_run
from dashboards.sections import LoggedRun
from dashboards.store import as_metrics, as_params, connect, experiment_id_of, run_tags
from specdec_core.base.environment import environment


class TrafficRun:
    """A run of the pair's experiment for one server, from its start to its end; `params` say what
    it serves, and how."""

    def __init__(self, pair: str, server: str, params: Mapping[str, Any]) -> None:
        self._pair, self._server, self._params = pair, server, params
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._waiting: list[Metric] = []

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log what was measured up to now. Raises :class:`Undelivered` where the store cannot be
        used; the values are then logged with the next ones."""
        self._waiting += as_metrics({name: {step: value} for name, value in values.items()})
        with delivering("the traffic is logged later"):
            client = self._client or self._begun()
            client.log_batch(self._run_id, metrics=self._waiting)
            self._waiting.clear()

    def end(self) -> None:
        """Log what was not yet logged, and end the run. Raises :class:`Undelivered`."""
        self.log({}, 0)
        with delivering("the run of the traffic stays open"):
            connect().set_terminated(self._run_id)

    def _begun(self) -> MlflowClient:
        client = connect()
        tags = {"traffic": self._server, **run_tags("serve", environment())}
        name = f"traffic {self._server}"
        run = client.create_run(experiment_id_of(client, self._pair), run_name=name, tags=tags)
        client.log_batch(run.info.run_id, params=as_params(self._params))
        self._client, self._run_id = client, run.info.run_id
        return client


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
