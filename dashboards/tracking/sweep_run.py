"""A sweep as runs of MLflow, logged when it has ended.

Of the configurations that a sweep only replayed, 50 get a run: the best of each family and draft,
then the fastest. `configurations.csv` of the parent run has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from dashboards.database import in_background
from dashboards.outputs.mlflow_runs import delivering, forget_unfinished, log_run
from dashboards.reports.load_choice import load_metrics
from dashboards.sections import LoggedRun, Metrics
from dashboards.store import FOLDER, connect, experiment_id_of, place_of, run_tags
from dashboards.tracking.registry import CHAMPION, register
from dashboards.tracking.trial_runs import timing_metrics, trial_run, trials_table
from specdec_core.evidence.server_choice import ServerSweep
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.search.observer import SweepObserver
from specdec_core.search.results import SweepResult

FILES = (  # of a sweep's folder, those that there are
    *("sweep.json", "plan.yaml", "rounds.parquet"),
    *("schedule.yaml", "simulated.csv"),
)


class SweepRun(SweepObserver):
    """Follows a sweep, and logs it once it has ended. A store that cannot be used is an error
    before anything is counted."""

    def __init__(self) -> None:
        self._prompts: Sequence[Prompt] = ()
        self._store: Future[MlflowClient] | None = None

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        if self._store is None:
            # Creating the store takes seconds: do it while Ray starts.
            self._store = in_background(lambda: connect(patient=True))

    def begun(self, result: SweepResult, prompts: Sequence[Prompt], folder: Path) -> None:
        self._prompts = prompts
        if self._store is not None:
            self._store.result()

    def finish(self, result: SweepResult, folder: Path, report: Path | None = None) -> int | None:
        """Log the sweep with its files and its `report`, and register the champion. Returns the
        registered version; None for a sweep without a champion, or with one that is only estimated
        for another machine.

        Raises :class:`Undelivered` where the store cannot be used."""
        with delivering(f"all results are in {folder}, and the same command logs them"):
            client = connect()

            def log() -> str:
                experiment_id = experiment_id_of(client, result.pair.name)
                forget_unfinished(client, experiment_id, folder)
                run = _sweep_run(result, self._prompts, folder, report)
                return log_run(client, experiment_id, run)

            log_once(client, result, folder, log)
            if result.champion is None or result.hardware is not None:
                return None
            return register(result, result.served.id, client)


def log_once(
    client: MlflowClient, result: SweepResult | ServerSweep, folder: Path, log: Callable[[], str]
) -> str:
    """The id of the run that has a sweep's result in `folder`: that of `log`, unless the store has
    one. It is kept in the result, so that a sweep that is interrupted now is not logged again."""
    # Another process may have logged it since the result was read.
    run_id = type(result).load(folder).mlflow_run_id
    if run_id is None or not _logged(client, run_id):
        run_id = result.mlflow_run_id = log()
        result.save(folder)
    result.mlflow_run_id = run_id
    return run_id


def _logged(client: MlflowClient, run_id: str) -> bool:
    """Whether the store has the whole run of a sweep."""
    try:
        info = client.get_run(run_id).info
        return bool(info.status == "FINISHED" and info.lifecycle_stage == "active")
    except MlflowException:  # it is in another store
        return False


def _sweep_run(
    result: SweepResult, prompts: Sequence[Prompt], folder: Path, report: Path | None
) -> LoggedRun:
    tags = {
        FOLDER: place_of(folder),
        "prompts": result.prompts.source,
        "prompts_digest": result.prompts.digest,
        **({"estimated_for": result.hardware} if result.hardware else {}),
        **run_tags("sweep", result.environment),
    }
    if result.champion is not None:
        served = result.served.id
        tags |= {CHAMPION: served, "champion_label": result.labels[served]}
    files = [*(folder / name for name in FILES), *([report] if report else [])]
    timed = {timing.config_id for timing in result.timings}
    kept = [trial for trial in result.trials if not trial.replayed or trial.id in timed]
    return LoggedRun(
        name=result.name,
        params={
            "pair": result.pair.model_dump(mode="json"),
            "prompts": {"source": result.prompts.source, "count": result.prompts.count},
            "max_new_tokens": result.max_new_tokens,
        },
        metrics=_summary(result),
        tags=tags,
        files=[(file, None) for file in files if file.exists()],
        texts={"configurations.csv": trials_table(result).to_csv(index=False)},
        prompts=(result.prompts, prompts, "sweep"),
        nested=[
            trial_run(result, trial)
            for trial in {each.id: each for each in (*kept, *result.notable())}.values()
        ],
    )


def _summary(result: SweepResult) -> Metrics:
    """The parent run's metrics: the champion's, the baseline's, the oracles', and those by load."""
    values: Metrics = {"configurations": len(result.trials)}
    if result.replay is not None:
        values["replayed_configurations"] = result.replay.configurations
        if result.replay.per_second:  # otherwise an earlier run has counted them
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
    if result.champion is not None:
        timings = [timing_metrics(t) for t in result.timings if t.config_id == result.champion]
        fastest = {**(timings[0] if timings else {}), **result.champion_trial.metrics}
        # What was chosen for a workload, and is the champion, may be another configuration.
        alone = "" if result.served.id == result.champion else "alone_"
        values |= {alone + name: value for name, value in fastest.items()}
    if result.under_load is not None:
        values |= load_metrics(result.under_load)
    return values
