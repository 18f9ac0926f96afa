"""The champion of each pair: a registered model with a configuration as each version. For another
server, as vLLM, each pair has one more model, with its own champion.

Its aliases are `champion`, what is served; `challenger`, what may take its place; and `previous`,
the champion before.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import yaml
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from dashboards.outputs.mlflow_runs import log_run
from dashboards.reports.load_choice import verdicts
from dashboards.reports.sentences import note
from dashboards.store import artifact, connect, every, no_store, runs_where, store_name
from dashboards.tracking.certificates import WEIGHTS, fetch, model_of, tag_version
from dashboards.tracking.trial_runs import trial_run
from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_folder, atomic_path
from specdec_core.config import Configuration, PairConfiguration, PairSpec, parse
from specdec_core.drafting.heads.storage import resolve_head
from specdec_core.drafting.states import find_state
from specdec_core.drafting.trained import weights_here
from specdec_core.evidence.server_choice import ServerSweep
from specdec_core.search.results import SweepResult, Trial

logger = logging.getLogger(__name__)

Alias = Literal["champion", "challenger", "previous"]
CHAMPION: Alias = "champion"
PREVIOUS: Alias = "previous"
SOURCE = f"{CHAMPION}/{CHAMPION}.yaml"
SERVER = "specdec.server"  # tag of a registered model: the server that its champions are of
PROMOTED = "specdec.promoted"  # tag of a registered model: when its champion was last set


def register(
    result: SweepResult,
    config_id: str,
    client: MlflowClient | None = None,
    alias: Alias = CHAMPION,
    server: str | None = None,
) -> int:
    """Make a configuration of a sweep the champion, or the challenger, of its pair, in this
    library's engine or in another `server`; returns the version. Tags say whether the workspace has
    a certificate for it.

    The version's source is an artifact of the configuration's run: `champion.yaml` with the pair
    and the configuration."""
    client = client or connect()
    trial = result.trial(config_id)
    run_id = _run_of(client, result, trial)
    timing = next((t for t in result.timings if t.config_id == config_id), None)
    speedup = f", {timing.speedup:.2f}× autoregressive decoding" if timing else ""
    about = f"{trial.configuration.label}{speedup}"
    if result.under_load is not None and result.under_load.chosen.id == config_id:
        about += "\n\n" + "\n".join(f"- {line}" for line in verdicts(result.under_load))
    tags = {"sweep": result.name}
    return _register(client, run_id, result.pair, trial.configuration, server, tags, about, alias)


def register_in_server(result: ServerSweep, run_id: str, folder: Path) -> int | None:
    """Make the champion of a server the champion of its pair in that server, a registered model
    `<pair>-<server>`; returns the version, None for a champion without a configuration. Its source
    has the files of `folder`, which start it."""
    client, race = connect(), result.race
    if result.configuration is None:
        return None
    client.log_artifacts(run_id, str(folder), CHAMPION)
    tags = {
        "sweep": race.name,
        "server": result.server,
        "server_version": race.autoregressive().version,
        "hardware": race.environment.get("gpu") or race.environment["cpu"],
    }
    chosen = race.pair, result.configuration
    return _register(client, run_id, *chosen, result.server, tags, result.champion)


def _register(
    client: MlflowClient,
    run_id: str,
    pair: PairSpec,
    configuration: Configuration,
    server: str | None,
    tags: Mapping[str, str],
    about: str,
    alias: Alias = CHAMPION,
) -> int:
    """Give the alias to the version of a pair's model in a server that is a run's configuration,
    and return it. A new version has `tags`, and a description that begins with `about`."""
    name = model_of(pair.name, server)
    _log_champion(client, run_id, pair, configuration)
    _create_model(client, name, server)
    versions = client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
    version = next(iter(versions), None) or client.create_model_version(
        name,
        source=f"{client.get_run(run_id).info.artifact_uri}/{CHAMPION}",
        run_id=run_id,
        tags={
            "config_id": configuration.id,
            **tags,
            "lossless": str(configuration.lossless).lower(),
        },
        description=f"{about}\n\n{note(configuration)}",
    )
    tag_version(client, version, pair, configuration, server)
    appoint(name, int(version.version), alias, client)
    return int(version.version)


def appoint(
    name: str, version: int, alias: Alias = CHAMPION, client: MlflowClient | None = None
) -> None:
    """Move an alias of a registered model to one of its versions; the champion's is `previous`
    then."""
    client = client or connect()
    aliases = client.get_registered_model(name).aliases
    if alias == CHAMPION:
        before = aliases.get(CHAMPION)
        if before is not None and int(before) != version:
            client.set_registered_model_alias(name, PREVIOUS, str(before))
        client.set_registered_model_tag(name, PROMOTED, str(time.time_ns()))
    client.set_registered_model_alias(name, alias, str(version))


def _log_champion(
    client: MlflowClient, run_id: str, pair: PairSpec, configuration: Configuration
) -> None:
    """Log all that another machine needs to decode with the configuration."""
    chosen = PairConfiguration(pair=pair, configuration=configuration)
    client.log_text(run_id, chosen.to_yaml(), SOURCE)
    if (weights := weights_here(pair, [configuration])) is not None:
        client.log_text(run_id, json.dumps(weights, indent=1), WEIGHTS)
    for place, path in _workspace_files(configuration).items():
        if not path.exists():
            raise UserError(f"{path}: missing; a champion is registered with the files it needs")
        log = client.log_artifacts if path.is_dir() else client.log_artifact
        log(run_id, str(path), f"{CHAMPION}/{place}")


def _create_model(client: MlflowClient, name: str, server: str | None) -> None:
    """Create the registered model of a pair in a server, unless it exists."""
    try:
        client.create_registered_model(
            name,
            description="The fastest configuration found for this pair; `lossless` says of each"
            " version whether it keeps the target's distribution.",
            tags={} if server is None else {SERVER: server},
        )
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _run_of(client: MlflowClient, result: SweepResult, trial: Trial) -> str:
    """The run of a configuration of a sweep. A replayed configuration that was not among the
    notable ones gets one now."""
    if result.mlflow_run_id is None:
        raise UserError(f"sweep {result.name} was not logged to MLflow: {trial.id} has no run")
    try:
        experiment = client.get_run(result.mlflow_run_id).info.experiment_id
    except MlflowException:
        raise UserError(f"{store_name()} has no run of sweep {result.name}") from None
    query = (
        f"tags.`mlflow.parentRunId` = '{result.mlflow_run_id}' and tags.config_id = '{trial.id}'"
    )
    run = next(runs_where(client, experiment, query), None)
    if run is not None:
        return str(run.info.run_id)
    return log_run(client, experiment, trial_run(result, trial), parent=result.mlflow_run_id)


class NoChampion(UserError):
    """None was promoted yet."""


class Registered(NamedTuple):
    """A version of a pair's registered model."""

    pair: PairSpec
    configuration: Configuration
    version: int


def find_champion(server: str | None = None) -> Registered | None:
    """The champion that was promoted last, of this engine or of another `server`; None where there
    is none."""
    if no_store():
        return None
    client = connect()
    models = [
        model
        for model in every(client.search_registered_models)
        # Models of other programs in the same store may use the same alias.
        if CHAMPION in model.aliases and PROMOTED in model.tags and model.tags.get(SERVER) == server
    ]
    if not models:
        return None
    name = max(models, key=lambda model: int(model.tags[PROMOTED])).name
    version = _look_up(client, name, CHAMPION)
    return None if version is None else _read(client, version)


def load_champion(server: str | None = None) -> Registered:
    """:func:`find_champion`. Raises :class:`NoChampion` where there is none."""
    found = find_champion(server)
    if found is None:
        where, engine = ("", "") if server is None else (f" for {server}", f" --engine {server}")
        raise NoChampion(
            f"no champion{where} in {store_name()} yet; `specdec sweep{engine}` finds one, `specdec"
            f" deploy --promote <config_id>{engine}` appoints one"
        )
    return found


def champion_version(name: str) -> int | None:
    """The number of the champion's version, without reading its files; None where there is none."""
    version = None if no_store() else _look_up(connect(), name, CHAMPION)
    return None if version is None else int(version.version)


def load_registered(name: str, which: Alias | int) -> Registered:
    """A version of the registered model `name`, by number or alias. Raises :class:`UserError` where
    there is none."""
    client = None if no_store() else connect()
    version = None if client is None else _look_up(client, name, which)
    if client is None or version is None:
        what = f"version {which}" if isinstance(which, int) else which
        raise UserError(f"no {what} of {name} in {store_name()}")
    return _read(client, version)


def _look_up(client: MlflowClient, name: str, which: Alias | int) -> ModelVersion | None:
    try:
        if isinstance(which, int):
            return client.get_model_version(name, str(which))
        return client.get_model_version_by_alias(name, which)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def _read(client: MlflowClient, version: ModelVersion) -> Registered:
    """The pair and the configuration of a version. Copies the files that it needs, and its
    certificate, into the workspace where they are missing; logs a warning where weights differ from
    those that the version was registered with."""
    if not version.run_id:
        raise UserError(
            f"{store_name()}: version {version.version} of {version.name} belongs to no run"
        )
    with tempfile.TemporaryDirectory() as scratch:
        content = yaml.safe_load(artifact(client, version, SOURCE, scratch).read_text())
        chosen = parse(PairConfiguration, content, SOURCE)
        pair, configuration = chosen.pair, chosen.configuration
        copies = {Path(file.path).name for file in client.list_artifacts(version.run_id, CHAMPION)}
        for place, path in _workspace_files(configuration).items():
            if place in copies and not path.exists():  # made elsewhere: it came with the champion
                _copy(artifact(client, version, f"{CHAMPION}/{place}", scratch), path)
        if Path(WEIGHTS).name in copies:
            digests = json.loads(artifact(client, version, WEIGHTS, scratch).read_text())
            _compare(version, digests, pair, configuration)
    fetch(client, version, pair, configuration)
    return Registered(pair, configuration, int(version.version))


def _compare(
    version: ModelVersion,
    registered: Mapping[str, str],
    pair: PairSpec,
    configuration: Configuration,
) -> None:
    """Log which weights differ from those that a version was registered with."""
    here = weights_here(pair, [configuration])
    if here is None:  # loading them will say what is missing
        return
    if other := [name for name in {**registered, **here} if registered.get(name) != here.get(name)]:
        logger.warning(
            "version %s of %s was registered with other weights of %s than are used here",
            *(version.version, version.name, ", ".join(other)),
        )


def _copy(files: Path, path: Path) -> None:
    """Copy to `path` the folder `files`, or the file of the same name in it."""
    if (files / path.name).is_file():
        with atomic_path(path) as copy:
            shutil.copy(files / path.name, copy)
    else:
        with atomic_folder(path) as folder:
            shutil.copytree(files, folder, dirs_exist_ok=True)


def _workspace_files(configuration: Configuration) -> dict[str, Path]:
    """The files of the workspace that a configuration needs, by the artifact with a copy: heads
    and the state that a bandit starts from. Files of the program, and files given by
    their path, are left out."""
    heads = [h for _, h in configuration.heads if not h.startswith("bundled:") and os.sep not in h]
    states = [name for name in configuration.states if Path(name).suffix != ".json"]
    paths = {
        "head": map(resolve_head, dict.fromkeys(heads)),
        "state": map(find_state, dict.fromkeys(states)),
    }
    return {
        f"{kind}-{number}" if number > 1 else kind: path
        for kind, needed in paths.items()
        for number, path in enumerate(needed, start=1)
    }
