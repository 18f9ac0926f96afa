"""The nested runs of a sweep's configurations."""

from __future__ import annotations

import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import Run, RunTag

from dashboards.reports.sentences import note
from dashboards.store import as_metrics, as_params, run_tags
from specdec_core.search.results import SweepResult, Trial, by_estimate


def log_trial(
    client: MlflowClient,
    experiment_id: str,
    parent_id: str,
    result: SweepResult,
    trial: Trial,
    run: Run | None = None,
) -> str:
    """Log a configuration as a finished run nested in its sweep's, `parent_id`; sets the trial's
    `mlflow_run_id` and returns it. `run` is the one that was begun earlier, if any."""
    configuration = trial.configuration
    tags = {
        "mlflow.parentRunId": parent_id,
        "config_id": trial.id,
        "family": configuration.family,
        "lossless": str(configuration.lossless).lower(),
        "stopped_early": str(not trial.finished).lower(),
        "counted": "replay" if trial.replayed else "live",
        "prompts_digest": result.prompts.digest,
        "configuration": configuration.to_yaml(),
        "mlflow.note.content": note(configuration),
        **run_tags("sweep", result.environment),
    }
    if run is None:
        name = result.labels.get(trial.id, configuration.without_sampling)
        run = client.create_run(experiment_id, run_name=name, tags=tags)
        tags = {}
    trial.mlflow_run_id = run.info.run_id
    if run.info.status != "FINISHED":
        client.log_batch(
            run.info.run_id,
            metrics=as_metrics({**trial.metrics, **trial.counts}),
            params=as_params(configuration.model_dump(mode="json")),
            tags=[RunTag(key, value) for key, value in tags.items()],
        )
        client.set_terminated(run.info.run_id)
    return run.info.run_id


def trials_table(result: SweepResult) -> pd.DataFrame:
    """One row a configuration, with its counts and rates; the best estimate first."""
    rows = [
        {
            "config_id": trial.id,
            "configuration": result.labels[trial.id],
            "family": trial.configuration.family,
            "lossless": trial.configuration.lossless,
            "counted": "replay" if trial.replayed else "live",
            **trial.metrics,
            **trial.counts,
        }
        for trial in by_estimate(result.trials)
    ]
    return pd.DataFrame(rows)
