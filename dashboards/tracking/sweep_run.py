"""The runs of a sweep, logged during the sweep.

Of the configurations that a sweep only replayed, 50 get a run: the best of each family and draft,
then the fastest. `configurations.csv` of the parent run has all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from dashboards.relocation import FOLDER
from dashboards.reports.load_choice import load_metrics
from dashboards.store import (
    as_metrics,
    as_params,
    connect,
    experiment_id_of,
    host,
    log_prompts,
    place_of,
    run_tags,
    runs_in,
    runs_where,
    store_name,
    unreachable,
)
from dashboards.tracking.delivered_run import DeliveredRun
from dashboards.tracking.delivery import Delivery
from dashboards.tracking.registry import CHAMPION, register
from dashboards.tracking.trial_runs import log_trial, trials_table
from specdec_core.base.files import needs_room
from specdec_core.base.observer import Observer
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.search.folder import SweepFolder
from specdec_core.search.observer import SweepObserver
from specdec_core.search.results import ESTIMATES, SweepResult, Timing, Trial

Metrics = dict[str, float | dict[int, float]]

# A tracking server answers several requests at a time, a file one.
_THREADS = 8
FILES = (  # of a sweep's folder, those that there are
    *("sweep.json", "plan.yaml", "rounds.parquet"),
    *("schedule.yaml", "simulated.csv"),
)


class SweepRun(DeliveredRun, SweepObserver):
    """A sweep's run, which the next sweep in the same folder continues. Runs that a killed sweep of
    the pair left open on this host, and that no sweep has continued, are ended as KILLED."""

    key = "config_id"

    def __init__(self, observer: Observer | None = None) -> None:
        super().__init__(observer)
        self.logged: dict[str, str] = {}  # config_id -> run_id
        self._connecting: threading.Thread | None = None

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        if self._connecting is None:
            # Creating the store takes seconds: do it while Ray starts.
            self._connecting = threading.Thread(target=self._connect, daemon=True)
            self._connecting.start()

    def begun(self, result: SweepResult, prompts: Sequence[Prompt], folder: Path) -> None:
        """Create the parent run, or continue it, and log what is missing."""
        if self._connecting is not None:
            self._connecting.join()
        self.delivery = delivery = Delivery()  # one thread: the run is begun first
        begin = partial(self._begin, delivery, result, prompts, folder)
        try:
            with needs_room(store_name()):
                begin()
        except (MlflowException, OSError) as error:
            if not unreachable(error):
                raise
            self.observer.warned(f"{store_name()} cannot be reached; it gets everything later")
            self._put(begin)
        for trial in result.trials:
            self.trial_finished(trial)
        if result.champion is not None:  # an earlier process stopped just before its end
            self.counted(result)

    def _begin(
        self, delivery: Delivery, result: SweepResult, prompts: Sequence[Prompt], folder: Path
    ) -> None:
        self.client = self.client or connect(patient=True)
        self.result = result
        self.experiment_id = experiment_id_of(self.client, result.pair.name)
        where = place_of(folder)
        tags = {
            FOLDER: where,
            "prompts": result.prompts.source,
            "prompts_digest": result.prompts.digest,
            **({"estimated_for": result.hardware} if result.hardware else {}),
            **run_tags("sweep", result.environment),
        }
        self._end_abandoned(where)
        if self._take_up(self._parent(folder, result.mlflow_run_id), result.name, tags):
            self._log_plan(result, prompts)
        result.mlflow_run_id = self.run_id
        if store_name().startswith("http"):
            delivery.add_threads(_THREADS - 1)

    def trial_finished(self, trial: Trial) -> None:
        """Log a configuration as a finished nested run and set the trial's `mlflow_run_id`.
        Replayed ones wait for :meth:`counted`: logging a run takes longer than replaying it."""
        if not trial.replayed:
            self._put(partial(self._log, trial))

    def counted(self, result: SweepResult) -> None:
        """Log the notable replayed configurations as nested runs, and a table of all there are.
        Then wait for the delivery: nothing else may run while finalists are timed."""
        for trial in result.notable():
            if trial.replayed:
                self._put(partial(self._log, trial))
        self._put(partial(self._log_table, result))
        if left := self._settle():
            self.observer.warned(self._absent(left))

    def finish(self, result: SweepResult, folder: Path, report: Path | None = None) -> int | None:
        """Log times, oracles and files, register the champion and end the run. Returns the
        registered version; None for a sweep without a champion, or with one that is only estimated
        for another machine.

        Raises :class:`Undelivered` where the store cannot be reached."""
        version: list[int] = []
        self._deliver(f"all results are in {folder}")
        self._put(lambda: version.extend(self._finish(result, folder, report)))
        self._deliver(f"all results are in {folder}")
        self.finished = True
        return version[-1] if version else None

    def _finish(self, result: SweepResult, folder: Path, report: Path | None) -> list[int]:
        """The version that was registered, if any."""
        self._update_runs(result)
        self._log_table(result)
        self._client.log_batch(self.run_id, metrics=as_metrics(_summary(result)))
        for file in (*(folder / name for name in FILES), report):
            if file is not None and file.exists():
                self._client.log_artifact(self.run_id, str(file))
        # plotly takes its time
        from dashboards.outputs.mlflow_runs import log_figures
        from dashboards.reports.sweep import read
        from dashboards.reports.sweep_figures import drawn

        log_figures(self._client, self.run_id, drawn(result, *read(result, folder)))
        version = []
        if result.champion is not None:
            if result.hardware is None:
                version.append(register(result, result.served.id, self._client))
            served = result.served
            label = result.labels[served.id]
            for tag, value in ((CHAMPION, served.id), ("champion_label", label)):
                self._client.set_tag(self.run_id, tag, value)
        self._client.set_terminated(self.run_id)
        return version

    def _update_runs(self, result: SweepResult) -> None:
        """Log to the nested runs what was known only after all were timed: times, corrected
        estimates, and distinct names where several configurations have the same label."""
        timings = {t.config_id: t for t in (result.autoregressive, *result.timings) if t}
        trials = {trial.id: trial for trial in result.trials}
        for config_id, run_id in self.logged.items():
            trial, timing = trials[config_id], timings.get(config_id)
            values = {key: trial.metrics[key] for key in ESTIMATES if key in trial.metrics}
            values |= _of_timing(timing) if timing is not None else {}
            if values:
                self._client.log_batch(run_id, metrics=as_metrics(values))
            if (name := result.labels[config_id]) != trial.configuration.without_sampling:
                self._client.update_run(run_id, name=name)

    def _log_table(self, result: SweepResult) -> None:
        table = trials_table(result).to_csv(index=False)
        self._client.log_text(self.run_id, table, "configurations.csv")

    def _log(self, trial: Trial) -> None:
        run = self._begun(trial.id)
        self.logged[trial.id] = log_trial(
            self._client, self.experiment_id, self.run_id, self.result, trial, run
        )

    def _connect(self) -> None:
        with suppress(Exception):  # raised again in the main thread, where the client is needed
            self.client = connect()

    # Runs of other processes

    def _parent(self, folder: Path, run_id: str | None) -> Run | None:
        """The parent run of an earlier process in this folder: one that did not end, or the one
        that the result names."""
        for run in runs_in(self._client, self.experiment_id, folder):
            if run.info.status != "FINISHED" or run.info.run_id == run_id:
                return run
        return None

    def _end_abandoned(self, where: str) -> None:
        """End the open runs of this host's other folders in which no sweep is running."""
        query = f"attributes.status = 'RUNNING' and tags.`{FOLDER}` LIKE '{host()}%'"
        for run in list(runs_where(self._client, self.experiment_id, query)):
            folder = run.data.tags[FOLDER]
            if folder != where and not SweepFolder(Path(folder.removeprefix(host()))).running:
                self._end(run.info.run_id, "KILLED")

    def _log_plan(self, result: SweepResult, prompts: Sequence[Prompt]) -> None:
        params = {
            "pair": result.pair.model_dump(mode="json"),
            "prompts": {"source": result.prompts.source, "count": result.prompts.count},
            "max_new_tokens": result.max_new_tokens,
        }
        self._client.log_batch(self.run_id, params=as_params(params))
        log_prompts(self._client, self.run_id, result.prompts, prompts, "sweep")


def _of_timing(timing: Timing) -> dict[str, float]:
    return {
        "speedup": timing.speedup,
        "speedup_low": timing.low,
        "speedup_high": timing.high,
        "tokens_per_second": timing.tokens_per_second,
        "tied_with_champion": timing.tied_with_champion,
        "differing_outputs": timing.differing_outputs,
    }


def _summary(result: SweepResult) -> Metrics:
    """The parent run's metrics: the champion's, the baseline's, the oracles', and those by load."""
    values: Metrics = {"configurations": len(result.trials)}
    if result.replay is not None:
        values["replayed_configurations"] = result.replay.configurations
        values["replayed_per_second"] = result.replay.per_second
        values["forwards_saved"] = result.replay.forwards_saved
    values["t_target"] = result.profile.t_target()
    for draft in result.profile.drafts:
        values[f"t_draft.{draft}"] = result.profile.t_draft(draft)
    for oracle in result.oracles:
        values[f"oracle_verification_rate.{oracle.draft}"] = oracle.verification_rate
        values[f"oracle_speedup.{oracle.draft}"] = oracle.speedup
    if result.autoregressive is not None:
        values["autoregressive_tokens_per_second"] = result.autoregressive.tokens_per_second
    for timing in result.timings:
        if timing.config_id == result.champion:
            values |= _of_timing(timing)
    if result.champion is not None:
        values |= result.champion_trial.metrics
    if result.under_load is not None:
        values |= load_metrics(result.under_load)
    return values
