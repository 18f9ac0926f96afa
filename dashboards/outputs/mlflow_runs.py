"""Results as runs of MLflow.

A run is logged when the work has ended and its results are on disk. If that is interrupted, or the
store does not answer, the same command logs the run again, whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from dashboards.sections import LoggedRun, Report
from dashboards.store import (
    FOLDER,
    as_metrics,
    as_params,
    connect,
    experiment_id_of,
    log_prompts,
    place_of,
    run_tags,
    runs_where,
    store_name,
    unreachable,
)
from specdec_core.base.environment import environment
from specdec_core.base.errors import UserError
from specdec_core.base.files import NoRoom, needs_room
from specdec_core.base.uris import without_passwords
from specdec_core.prompts.prompt_sets import Prompt, PromptSet

PARENT = "mlflow.parentRunId"


class Undelivered(UserError):
    """The store does not take results that are complete on disk."""


@contextmanager
def delivering(what: str) -> Iterator[None]:
    """Raises :class:`Undelivered` if the store cannot be used during the block; `what` says what
    becomes of the results."""
    try:
        with needs_room(store_name()):
            yield
    except NoRoom:
        raise
    except (UserError, MlflowException, OSError) as error:
        if not (isinstance(error, UserError) or unreachable(error)):
            raise
        reason = without_passwords(str(error).strip().partition("\n")[0])
        where = "" if isinstance(error, UserError) else f"{store_name()} cannot be reached: "
        raise Undelivered(f"{where}{reason}; {what}") from error


def log(
    report: Report,
    files: Iterable[Path],
    prompts: tuple[PromptSet, Sequence[Prompt]] | None = None,
    resume: Path | None = None,
) -> str:
    """Log a report to its pair's experiment, with `files` (folders with all their contents).
    Returns the run's id.

    `prompts` are logged as a dataset. A run that an interrupted process began for the folder
    `resume` is replaced.
    """
    client = connect()
    experiment_id = experiment_id_of(client, report.origin.pair)
    tags = {**run_tags(report.command, environment()), **report.tags}
    if resume is not None:
        tags[FOLDER] = place_of(resume)
        forget_unfinished(client, experiment_id, resume)
    run = LoggedRun(
        name=report.run_name or f"{report.command} {report.origin.name}",
        params=report.origin.params,
        metrics=report.metrics,
        tags=tags,
        files=[(file, None) for file in files],
        prompts=None if prompts is None else (*prompts, report.command),
        nested=report.nested,
    )
    return log_run(client, experiment_id, run)


def log_run(
    client: MlflowClient, experiment_id: str, run: LoggedRun, parent: str | None = None
) -> str:
    """Log a run that has ended, and the runs that are nested in it; returns its id. It is nested
    in the run `parent`, if that is given."""
    tags = {**run.tags, **({PARENT: parent} if parent else {})}
    run_id = str(client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id)
    client.log_batch(run_id, metrics=as_metrics(run.metrics), params=as_params(run.params))
    if run.prompts is not None:
        log_prompts(client, run_id, *run.prompts)
    for file, place in run.files:
        log_file = client.log_artifacts if file.is_dir() else client.log_artifact
        log_file(run_id, str(file), place)
    for name, text in run.texts.items():
        client.log_text(run_id, text, name)
    for nested in run.nested:
        log_run(client, experiment_id, nested, run_id)
    client.set_terminated(run_id)
    return run_id


def forget(client: MlflowClient, run: Run) -> None:
    """Delete a run and the runs that are nested in it."""
    query = f"tags.`{PARENT}` = '{run.info.run_id}'"
    for each in (*runs_where(client, run.info.experiment_id, query), run):
        client.delete_run(each.info.run_id)


def forget_unfinished(client: MlflowClient, experiment_id: str, folder: Path) -> None:
    """Delete the runs of a folder that an interrupted process has begun to log."""
    query = f"tags.`{FOLDER}` = '{place_of(folder)}'"
    for run in list(runs_where(client, experiment_id, query)):
        if run.info.status != "FINISHED":
            forget(client, run)
