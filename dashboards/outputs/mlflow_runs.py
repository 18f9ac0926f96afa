"""Reports as runs of MLflow, and figures as their artifacts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from mlflow import MlflowClient

from dashboards.outputs.html import figure_page
from dashboards.relocation import FOLDER
from dashboards.sections import LoggedRun, Report, Section
from dashboards.store import (
    as_metrics,
    as_params,
    connect,
    experiment_id_of,
    log_prompts,
    place_of,
    run_tags,
    runs_in,
)
from specdec_core.base.environment import environment
from specdec_core.prompts.prompt_sets import Prompt, PromptSet

AT_ONCE = 1000  # metrics that a store takes in one request


def log(
    report: Report,
    files: Iterable[Path],
    prompts: tuple[PromptSet, Sequence[Prompt]] | None = None,
    resume: Path | None = None,
) -> str:
    """Log a report to its pair's experiment: parameters and metrics, nested runs, `files` (folders
    with all their contents), and each figure. Returns the run's id.

    `prompts` are logged as a dataset. A run that an interrupted process began for the folder
    `resume` is continued.
    """
    client = connect()
    experiment_id = experiment_id_of(client, report.origin.pair)
    tags = {**run_tags(report.command, environment()), **report.run.tags}
    run_id = None
    if resume is not None:
        tags[FOLDER] = place_of(resume)
        earlier = runs_in(client, experiment_id, resume)
        run_id = next((r.info.run_id for r in earlier if r.info.status != "FINISHED"), None)
    if run_id is None:
        run = client.create_run(experiment_id, run_name=report.run.name, tags=tags)
        run_id = run.info.run_id
    _log_values(client, run_id, report.run)
    if prompts is not None:
        log_prompts(client, run_id, *prompts, report.command)
    for nested in report.run.nested:
        log_run(client, experiment_id, nested, {"mlflow.parentRunId": run_id})
    for file in files:
        log_file = client.log_artifacts if file.is_dir() else client.log_artifact
        log_file(run_id, str(file))
    log_figures(client, run_id, report.figures)
    client.set_terminated(run_id)
    return run_id


def log_run(
    client: MlflowClient, experiment_id: str, run: LoggedRun, tags: dict[str, str] | None = None
) -> str:
    """Log a run that has ended, with further `tags`; returns its id."""
    tags = {**(tags or {}), **run.tags}
    run_id = client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
    _log_values(client, run_id, run)
    client.set_terminated(run_id)
    return str(run_id)


def log_figures(client: MlflowClient, run_id: str, sections: Iterable[Section]) -> None:
    """Log each section's figure to a run as `figures/<key>.html`, a page that draws itself without
    a network, and its numbers, if it has some, as `figures/<key>.csv`."""
    for section in sections:
        client.log_text(run_id, figure_page(section), f"figures/{section.key}.html")
        if section.frame is not None:
            numbers = section.frame.to_csv(index=False)
            client.log_text(run_id, numbers, f"figures/{section.key}.csv")


def _log_values(client: MlflowClient, run_id: str, run: LoggedRun) -> None:
    client.log_batch(run_id, params=as_params(run.params))
    metrics = as_metrics(run.metrics)
    for start in range(0, len(metrics), AT_ONCE):
        client.log_batch(run_id, metrics=metrics[start : start + AT_ONCE])
