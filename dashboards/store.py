"""The MLflow store: its connection, experiments and runs, and values as it takes them."""

from __future__ import annotations

import getpass
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from mlflow import MlflowClient
from mlflow.data.code_dataset_source import CodeDatasetSource
from mlflow.data.pandas_dataset import from_pandas
from mlflow.entities import DatasetInput, InputTag, Metric, Param, Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.store.entities import PagedList
from sqlalchemy.exc import SQLAlchemyError

from dashboards.database import SECONDS, in_background, is_database, missing, prepare, sqlite_file
from dashboards.relocation import artifacts_of, relocate
from dashboards.views import present
from specdec_core.base.errors import UserError
from specdec_core.base.files import needs_room
from specdec_core.base.uris import sqlite_uri, without_passwords
from specdec_core.base.workspace import remember, workspace
from specdec_core.prompts.prompt_sets import Prompt, PromptSet

Found = TypeVar("Found")

FOLDER = "specdec.folder"  # tag of a run that is taken up again: the place of its folder
# The store did not answer, or answered that it cannot take anything now.
_LATER = {"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED"}


def tracking_uri() -> str:
    """`MLFLOW_TRACKING_URI`, else a SQLite file in the workspace."""
    return os.environ.get("MLFLOW_TRACKING_URI") or _own_uri()


def _own_uri() -> str:
    return sqlite_uri(workspace() / "mlflow.db")


def own_store() -> bool:
    """Whether the store is the workspace's own."""
    return tracking_uri() == _own_uri()


def store_name() -> str:
    """The store's address without its password."""
    return without_passwords(tracking_uri())


def no_store() -> bool:
    """Whether the store does not exist yet: a look into it would create it."""
    file = sqlite_file(tracking_uri())
    return file is not None and missing(file)


def connect(patient: bool = False) -> MlflowClient:
    """A client of the tracking store, which is created where it is missing. Raises
    :class:`UserError` when it cannot be used; if `patient`, not for a server of MLflow that may
    answer later."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It logs tracebacks of errors that are raised as well and shown in one line.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    uri = tracking_uri()
    try:
        with needs_room(store_name()):
            if is_database(uri):
                prepare(uri)
            client = MlflowClient(uri)
            # A database has answered, and takes its time for the tables of a new store.
            limit = None if is_database(uri) else SECONDS
            in_background(lambda: client.search_experiments(max_results=1)).result(limit)
    except (MlflowException, SQLAlchemyError, TimeoutError) as error:
        if not (patient and unreachable(error)):
            reason = str(error).strip().splitlines() or [f"no answer in {SECONDS:g} seconds"]
            raise UserError(
                f"{store_name()} (MLFLOW_TRACKING_URI): cannot be used: {reason[0]}"
            ) from error
    if own_store():
        relocate(workspace() / "mlflow.db", workspace())
        remember(workspace())
    return client


def unreachable(error: BaseException) -> bool:
    """Whether the store may take later what it did not take now."""
    if isinstance(error, MlflowException):
        return error.error_code in _LATER
    return isinstance(error, OSError)  # requests' errors among them


def experiment_id_of(client: MlflowClient, name: str) -> str:
    """The id of the experiment `name`, created where it is missing."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        location = artifacts_of(workspace(), name) if own_store() else None
        experiment = client.get_experiment(
            client.create_experiment(name, artifact_location=location)
        )
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    present(client, experiment)
    return experiment.experiment_id


def every(search: Callable[..., PagedList[Found]], *query: Any) -> Iterator[Found]:
    """All that a search finds, page after page."""
    token = None
    while True:
        page = search(*query, page_token=token)
        yield from page
        if not (token := page.token):
            return


def runs_where(client: MlflowClient, experiment_id: str, query: str) -> Iterator[Run]:
    return every(client.search_runs, [experiment_id], query)


def artifact(client: MlflowClient, version: ModelVersion, path: str, scratch: str) -> Path:
    """A copy in the folder `scratch` of an artifact of a version's run. Raises :class:`UserError`
    where it cannot be had."""
    assert version.run_id
    place = client.get_run(version.run_id).info.artifact_uri
    try:
        return Path(client.download_artifacts(version.run_id, path, scratch))
    except (MlflowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"version {version.version} of {version.name}: no {path} in {place} ({reason}); copy it"
            " there from where it was made, or sweep again"
        ) from None


def run_tags(command: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The tags of a run of `specdec <command>`: git commit, hardware and library versions."""
    tags = {
        **environment,
        "mlflow.user": user_name(),
        "mlflow.source.name": f"specdec {command}",
    }
    if commit := environment.get("git_commit"):
        tags["mlflow.source.git.commit"] = commit.removesuffix("-dirty")
    return tags


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def as_metrics(values: Mapping[str, float | Mapping[int, float]]) -> list[Metric]:
    """Numbers, or numbers by step."""
    now = int(time.time() * 1000)
    return [
        Metric(key, float(number), now, step)
        for key, value in values.items()
        for step, number in (value if isinstance(value, Mapping) else {0: value}).items()
    ]


def as_params(values: Mapping[str, Any]) -> list[Param]:
    return [Param(key, str(value)) for key, value in _flat(values) if value is not None]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def place_of(folder: Path) -> str:
    """What names a folder in the store, without the quotes that a query could not hold: its path in
    the workspace, wherever that lies, in the workspace's own store; else host and path."""
    path, home = folder.resolve(), workspace()
    if own_store() and path.is_relative_to(home):
        place = str(path.relative_to(home))
    else:
        place = f"{platform.node()}:{path}"
    return place.replace("'", "_")


def log_prompts(
    client: MlflowClient,
    run_id: str,
    prompt_set: PromptSet,
    prompts: Sequence[Prompt],
    context: str,
) -> None:
    """Log a prompt set as a dataset that a run used for `context`."""
    table = pd.DataFrame({"id": [p.id for p in prompts], "prompt": [p.text for p in prompts]})
    dataset = from_pandas(
        table,
        source=CodeDatasetSource({"prompts": prompt_set.source}),
        name=Path(prompt_set.source).name,
        digest=prompt_set.digest[:36],  # as long as the store allows
    )
    tag = InputTag("mlflow.data.context", context)
    client.log_inputs(run_id, [DatasetInput(dataset._to_mlflow_entity(), [tag])])
