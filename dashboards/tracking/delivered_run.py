"""A run in MLflow that background threads write during the work.

A store that cannot be reached for a while does not delay the work, and misses nothing. Where it is
still unreachable at the end, the same command, given again, delivers the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from mlflow import MlflowClient
from mlflow.entities import Run

from dashboards.store import as_params, connect, experiment_id_of, runs_where, store_name
from dashboards.tracking.delivery import Delivery
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer

PATIENCE = 60.0  # seconds that work waits for an unreachable store
LEAVING = 5.0  # the same after an interruption


class Undelivered(UserError):
    """The store could not be reached at the end of work that is complete on disk."""


class DeliveredRun(Observer):
    """A parent run and its nested runs, which the tag `key` identifies.

    A context manager around the work: after an exception the run ends as KILLED (interrupted) or
    FAILED, and the same work, repeated, continues it. Runs are found by their tags, so nothing is
    logged twice, however the earlier process ended.

    `observer` follows the delivery to a slow store.
    """

    key: str

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = observer or Observer()
        self.client: MlflowClient | None = None
        self.experiment_id = self.run_id = ""  # until the run is begun
        self.finished = False
        self.delivery: Delivery | None = None
        self._earlier: dict[str, Run] = {}  # nested runs of an earlier process, by their key
        self._tried: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.delivery is None:
            return
        if not self.finished and not isinstance(error, Undelivered):
            status = "FAILED" if kind is None or issubclass(kind, Exception) else "KILLED"
            self.delivery.settle(LEAVING, LEAVING)
            self.delivery.drop()  # it is on disk, and logged when the work is repeated
            self.delivery.put(lambda: self._end(self.run_id, status))
            if self.delivery.settle(LEAVING, LEAVING) and error is not None:
                error.add_note(f"{store_name()} cannot be reached: its runs stay as they are")
        self.delivery.close()

    @property
    def _client(self) -> MlflowClient:
        assert self.client is not None
        return self.client

    def waiting(self) -> int:
        """Entries that the store has not taken yet."""
        return self.delivery.left if self.delivery is not None else 0

    def _start(
        self,
        pair: str,
        identity: tuple[str, str],
        name: str,
        tags: Mapping[str, str],
        params: Mapping[str, Any],
    ) -> None:
        """Begin the run in the pair's experiment that has the tag `identity`, or else a new one, in
        the background."""
        self.client = connect(patient=True)
        self.delivery = Delivery()  # one thread: the run is begun before anything is logged to it

        def begin() -> None:
            self.experiment_id = experiment_id_of(self._client, pair)
            query = "tags.{} = '{}'".format(*identity)
            parent = next(runs_where(self._client, self.experiment_id, query), None)
            if self._take_up(parent, name, {**dict([identity]), **tags}):
                self._client.log_batch(self.run_id, params=as_params(params))

        self._put(begin)

    def _put(self, job: Callable[[], object]) -> None:
        assert self.delivery is not None
        self.delivery.put(job)

    def _settle(self) -> int:
        """Wait for the store; returns how many jobs it did not take."""
        assert self.delivery is not None
        step = Observer().step
        if (left := self.delivery.left) > 1:
            self.observer.stage("writing to MLflow", left)
            step = self.observer.step
        return self.delivery.settle(PATIENCE, step=step)

    def _deliver(self, results: str) -> None:
        """Wait for the store. Raises :class:`Undelivered`, which says where the `results` are,
        unless it takes everything."""
        if left := self._settle():
            raise Undelivered(
                f"{self._absent(left)}; {results}, and the same command delivers them"
            )

    def _absent(self, left: int) -> str:
        assert self.delivery is not None
        reason = self.delivery.trouble or "no answer"
        return f"{store_name()} cannot be reached, {left} entries wait ({reason})"

    def _take_up(self, parent: Run | None, name: str, tags: dict[str, str]) -> bool:
        """Continue the run `parent`, or create it; returns whether it has no parameters yet."""
        if parent is not None:
            self._client.update_run(parent.info.run_id, "RUNNING")
        run = parent or self._client.create_run(self.experiment_id, tags=tags, run_name=name)
        self.run_id = run.info.run_id
        for nested in self._nested(self.run_id):
            self._earlier[nested.data.tags.get(self.key, "")] = nested
        return not run.data.params

    def _begun(self, value: str) -> Run | None:
        """The nested run with this key, if there is one."""
        if value in self._tried:  # the store may have created the run and lost the answer
            return next(self._nested(self.run_id, f" and tags.{self.key} = '{value}'"), None)
        self._tried.add(value)
        return self._earlier.get(value)

    def _nested_run(self, value: str, name: str, tags: dict[str, str]) -> Run:
        """The nested run with this key; created with `name` and `tags` where there is none."""
        given = {"mlflow.parentRunId": self.run_id, self.key: value, **tags}
        return self._begun(value) or self._client.create_run(
            self.experiment_id, run_name=name, tags=given
        )

    def _nested(self, run_id: str, query: str = "") -> Iterator[Run]:
        query = f"tags.`mlflow.parentRunId` = '{run_id}'{query}"
        return runs_where(self._client, self.experiment_id, query)

    def _end(self, run_id: str, status: str) -> None:
        """End a run, if it was begun, and those nested in it that are still open."""
        if not run_id:
            return
        for run in list(self._nested(run_id, " and attributes.status = 'RUNNING'")):
            self._client.set_terminated(run.info.run_id, status)
        self._client.set_terminated(run_id, status)
