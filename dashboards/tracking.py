"""MLflow: an experiment for each pair, a parent run for each sweep with a nested run for each
configuration, and the champion as a registered model.

Of configurations that a sweep only replayed, the best of each family and draft and then the fastest
have a run of their own, 50 in all; `configurations.csv` of the parent run has every one.

A sweep's runs are logged beside it, by threads of their own. A store that cannot be reached for a
while holds nothing up and misses nothing; one that cannot be reached at the end either is told by
the same command, whenever that is given again.
"""

from __future__ import annotations

import getpass
import logging
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import mlflow
import mlflow.data
import pandas as pd
import yaml
from mlflow import MlflowClient
from mlflow.data.code_dataset_source import CodeDatasetSource
from mlflow.entities import DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from dashboards.delivery import Delivery, unreachable
from dashboards.views import present
from specdec_core.base.errors import UserError
from specdec_core.base.files import needs_room
from specdec_core.base.workspace import workspace
from specdec_core.config import Configuration, PairSpec, parse
from specdec_core.drafting.heads.storage import resolve_head
from specdec_core.drafting.states import find_state
from specdec_core.prompts.prompt_sets import Prompt, PromptSet
from specdec_core.search.folder import SweepFolder
from specdec_core.search.observer import Observer
from specdec_core.search.results import SweepResult, Timing, Trial, by_estimate

CHAMPION = "champion"
PROMOTED = "specdec.promoted"  # tag of a registered model: when its champion was last set
FOLDER = "specdec.folder"  # tag of a sweep's run: host and folder
PATIENCE = 60.0  # seconds in which an absent store may come back before a sweep goes on without
LEAVING = 5.0  # likewise, of a sweep that was interrupted

# Tracking servers answer many at a time, a file one.
_SENDERS = 8

# Sweeps try again by themselves; by default each request takes minutes to give up.
_QUIET = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def tracking_uri() -> str:
    """`MLFLOW_TRACKING_URI`, else a SQLite file in the workspace."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{workspace() / 'mlflow.db'}"


def connect(patient: bool = False) -> MlflowClient:
    """A client of the tracking store, which is created where it is missing. Raises
    :class:`UserError` when it cannot be used; where `patient`, not when it may be had later."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It logs whole tracebacks of errors that come out all the same and are told in a line.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    uri = tracking_uri()
    try:
        with needs_room(uri):
            client = MlflowClient(uri)
            client.search_experiments(max_results=1)
    except MlflowException as error:
        if not (patient and unreachable(error)):
            reason = str(error).splitlines()[0]
            raise UserError(f"{uri} (MLFLOW_TRACKING_URI): cannot be used: {reason}") from None
    return client


class Undelivered(UserError):
    """The store could not be reached at the end of work that is complete on disk."""


class DeliveredRun(Observer):
    """A parent run that is written while the work that it is about goes on.

    Use it around the work: left by an exception, the run ends as KILLED (interrupted) or FAILED,
    and whoever repeats the work takes it up again. Runs are found by their tags, so nothing is
    logged twice, however the process before ended.

    `tell` hears how the delivery to a slow store goes.
    """

    def __init__(self, tell: Observer | None = None) -> None:
        self.tell = tell or Observer()
        self.client: MlflowClient | None = None
        self.experiment_id: str | None = None
        self.run_id: str | None = None
        self.finished = False
        self.delivery: Delivery | None = None

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
            self.delivery.drop()  # it is on disk, and logged when the work is taken up again
            self.delivery.put(lambda: self._end(self.run_id, status))
            if self.delivery.settle(LEAVING, LEAVING) and error is not None:
                error.add_note(f"{tracking_uri()} cannot be reached: its runs stay as they are")
        self.delivery.close()

    @property
    def _client(self) -> MlflowClient:
        assert self.client is not None
        return self.client

    def _put(self, job: Callable[[], object]) -> None:
        assert self.delivery is not None
        self.delivery.put(job)

    def _settle(self) -> int:
        """Wait for the store; returns how many jobs it did not take."""
        assert self.delivery is not None
        step = Observer().step
        if (left := self.delivery.left) > 1:
            self.tell.stage("writing to MLflow", left)
            step = self.tell.step
        return self.delivery.settle(PATIENCE, step=step)

    def _absent(self, left: int) -> str:
        assert self.delivery is not None
        reason = self.delivery.trouble or "no answer"
        return f"{tracking_uri()} cannot be reached, {left} entries wait ({reason})"

    def _nested(self, run_id: str | None, query: str = "") -> Iterator[Run]:
        query = f"tags.`mlflow.parentRunId` = '{run_id}'{query}"
        return runs_where(self._client, self.experiment_id, query)

    def _end(self, run_id: str | None, status: str) -> None:
        """End a run, if it was begun, and those nested in it that are still open."""
        if run_id is None:
            return
        for run in list(self._nested(run_id, " and attributes.status = 'RUNNING'")):
            self._client.set_terminated(run.info.run_id, status)
        self._client.set_terminated(run_id, status)


class SweepRun(DeliveredRun):
    """A sweep's run. The next sweep in the same folder takes it up again. Runs of sweeps on this
    host whose process was killed, and that nobody has taken up, are ended as KILLED by the pair's
    next sweep."""

    def __init__(self, tell: Observer | None = None) -> None:
        super().__init__(tell)
        self.earlier: dict[str, Run] = {}  # nested runs of earlier processes, by config_id
        self.logged: dict[str, str] = {}  # config_id -> run_id
        self._tried: set[str] = set()
        self._connecting: threading.Thread | None = None

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        if self._connecting is None:
            # Creating the store takes seconds: do it while Ray starts.
            self._connecting = threading.Thread(target=self._connect, daemon=True)
            self._connecting.start()

    def begun(self, result: SweepResult, prompts: Sequence[Prompt], folder: Path) -> None:
        """Create the parent run, or take it up again and log what is missing."""
        if self._connecting is not None:
            self._connecting.join()
        self.delivery = Delivery()  # by one thread: a run is begun before what is in it
        begin = partial(self._begin, result, prompts, folder)
        try:
            with needs_room(tracking_uri()):
                begin()
        except (MlflowException, OSError) as error:
            if not unreachable(error):
                raise
            self.tell.warned(f"{tracking_uri()} cannot be reached; it is told of all later")
            self._put(begin)
        for trial in result.trials:
            self.trial_finished(trial)
        if result.champion is not None:  # only the end of an earlier process was missing
            self.counted(result)

    def _begin(self, result: SweepResult, prompts: Sequence[Prompt], folder: Path) -> None:
        self.client = self.client or connect(patient=True)
        self.result = result
        self.experiment_id = experiment_id_of(self.client, result.pair.name)
        where = f"{_host()}{folder.resolve()}".replace("'", "_")  # it is quoted below
        tags = {
            FOLDER: where,
            "prompts": result.prompts.source,
            "prompts_digest": result.prompts.digest,
            **({"estimated_for": result.hardware} if result.hardware else {}),
            **_environment_tags(result),
        }
        self._end_abandoned(where)
        parent = self._earlier(where, result.mlflow_run_id)
        if parent is None:
            parent = self.client.create_run(self.experiment_id, tags=tags, run_name=result.name)
            self.run_id = parent.info.run_id
            self._log_plan(result, prompts)
        else:
            self.run_id = parent.info.run_id
            self.client.update_run(self.run_id, "RUNNING")
        result.mlflow_run_id = self.run_id
        for run in self._nested(self.run_id):
            self.earlier[run.data.tags.get("config_id", "")] = run
        if tracking_uri().startswith("http"):
            self.delivery.employ(_SENDERS - 1)

    def trial_finished(self, trial: Trial) -> None:
        """Log a configuration as a finished nested run; the trial learns its id. Replayed ones wait
        for :meth:`counted`: a run takes longer to log than thousands of rounds to replay."""
        if not trial.replayed:
            self._put(partial(self._log, trial))

    def counted(self, result: SweepResult) -> None:
        """Log the notable ones of the replayed configurations as nested runs, and all of the
        sweep's as a table; then wait until everything is delivered, because nothing may run while
        finalists are timed."""
        for trial in result.notable():
            if trial.replayed:
                self._put(partial(self._log, trial))
        table = trials_table(result).to_csv(index=False)
        self._put(lambda: self._client.log_text(self.run_id, table, "configurations.csv"))
        if left := self._settle():
            self.tell.warned(self._absent(left))

    def finish(self, result: SweepResult, folder: Path, report: Path | None = None) -> int | None:
        """Log times, oracles and files, register the champion and end the run. Returns the
        registered version; None for a sweep without a champion, and for one that is estimated for
        another machine, because what is registered was timed.

        Raises :class:`Undelivered` where the store cannot be reached."""
        version: list[int] = []
        if not (left := self._settle()):
            self._put(lambda: version.extend(self._finish(result, folder, report)))
            left = self._settle()
        if left:
            raise Undelivered(
                f"{self._absent(left)}; all results are in {folder}, and the same command delivers "
                "them"
            )
        self.finished = True
        return version[-1] if version else None

    def _finish(self, result: SweepResult, folder: Path, report: Path | None) -> list[int]:
        """The version that was registered, if any."""
        client = self._client
        for timing in (result.autoregressive, *result.timings):
            if timing is not None and timing.config_id in self.logged:
                run_id = self.logged[timing.config_id]
                client.log_batch(run_id, metrics=as_metrics(_timing(timing)))
        client.log_batch(self.run_id, metrics=as_metrics(_summary(result)))
        for trial in result.trials:
            # Runs are named as they come; others of the same name may have come since.
            named, known = result.labels[trial.id], trial.configuration.without_sampling
            if named != known and trial.id in self.logged:
                client.update_run(self.logged[trial.id], name=named)
        for file in (
            folder / "sweep.json",
            folder / "plan.yaml",
            folder / "rounds.parquet",
            report,
        ):
            if file is not None and file.exists():
                client.log_artifact(self.run_id, str(file))
        from dashboards.report import log_report_figures  # plotly takes its time

        log_report_figures(client, self.run_id, result, folder)
        version = []
        if result.champion is not None:
            if result.hardware is None:
                version.append(register(result, result.champion, client))
            client.set_tag(self.run_id, CHAMPION, result.champion)
            client.set_tag(self.run_id, "champion_label", result.labels[result.champion])
        client.set_terminated(self.run_id)
        return version

    def _log(self, trial: Trial) -> None:
        run = self.earlier.get(trial.id)
        if trial.id in self._tried:  # and the store may have made the run, unheard
            query = f"tags.`mlflow.parentRunId` = '{self.run_id}' and tags.config_id = '{trial.id}'"
            run = next(runs_where(self._client, self.experiment_id, query), None)
        self._tried.add(trial.id)
        self.logged[trial.id] = log_trial(self._client, self.experiment_id, self.result, trial, run)

    def _connect(self) -> None:
        with suppress(Exception):  # shows again where the client is needed, in the main thread
            self.client = connect()

    # Runs of other processes

    def _earlier(self, where: str, run_id: str | None) -> Run | None:
        """The parent run that an earlier process left for this folder: one that did not end, or
        the one that the result names."""
        for run in runs_where(self._client, self.experiment_id, f"tags.`{FOLDER}` = '{where}'"):
            if run.info.status != "FINISHED" or run.info.run_id == run_id:
                return run
        return None

    def _end_abandoned(self, where: str) -> None:
        """End the runs of other folders of this host that no process sweeps in any more."""
        query = f"attributes.status = 'RUNNING' and tags.`{FOLDER}` LIKE '{_host()}%'"
        for run in list(runs_where(self._client, self.experiment_id, query)):
            folder = run.data.tags[FOLDER]
            if folder != where and not SweepFolder(Path(folder.removeprefix(_host()))).running:
                self._end(run.info.run_id, "KILLED")

    def _log_plan(self, result: SweepResult, prompts: Sequence[Prompt]) -> None:
        params = {
            "pair": result.pair.model_dump(mode="json"),
            "prompts": {"source": result.prompts.source, "count": result.prompts.count},
            "max_new_tokens": result.max_new_tokens,
        }
        self._client.log_batch(self.run_id, params=as_params(params))
        log_prompts(self._client, self.run_id, result.prompts, prompts, "sweep")


def _host() -> str:
    return f"{platform.node()}:"


def log_prompts(
    client: MlflowClient, run_id: str, used: PromptSet, prompts: Sequence[Prompt], context: str
) -> None:
    """Log a prompt set as a dataset that a run used for `context`."""
    table = pd.DataFrame({"id": [p.id for p in prompts], "prompt": [p.text for p in prompts]})
    dataset = mlflow.data.from_pandas(
        table,
        source=CodeDatasetSource({"prompts": used.source}),
        name=Path(used.source).name,
        digest=used.digest[:36],  # as long as the store allows
    )
    tag = InputTag("mlflow.data.context", context)
    client.log_inputs(run_id, [DatasetInput(dataset._to_mlflow_entity(), [tag])])


def log_trial(
    client: MlflowClient,
    experiment_id: str,
    result: SweepResult,
    trial: Trial,
    run: Run | None = None,
) -> str:
    """A configuration as a finished nested run of its sweep's; the trial learns its id, which is
    returned. `run` is the one that was begun earlier, if any."""
    configuration = trial.configuration
    tags = {
        "mlflow.parentRunId": result.mlflow_run_id,
        "config_id": trial.id,
        "family": configuration.family,
        "lossless": str(configuration.lossless).lower(),
        "stopped_early": str(not trial.finished).lower(),
        "counted": "replay" if trial.replayed else "live",
        "prompts_digest": result.prompts.digest,
        "configuration": configuration.to_yaml(),
        "mlflow.note.content": described(configuration),
        **_environment_tags(result),
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


def described(configuration: Configuration) -> str:
    """A configuration in words and as YAML, in Markdown."""
    return f"{configuration.sentence}\n\n```yaml\n{configuration.to_yaml()}```"


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


# The champion


def register(result: SweepResult, config_id: str, client: MlflowClient | None = None) -> int:
    """Make a configuration of a sweep the champion of its pair; returns the version.

    The version's source is an artifact of the configuration's run: `champion.yaml` with the pair
    and the configuration."""
    client = client or connect()
    trial = result.trial(config_id)
    name = result.pair.name
    run_id = trial.mlflow_run_id or _logged(result, trial, client)
    try:
        run = client.get_run(run_id)
    except MlflowException:
        raise UserError(
            f"{tracking_uri()} has no run of {config_id} (sweep {result.name})"
        ) from None
    content = {
        "pair": result.pair.model_dump(mode="json"),
        "configuration": trial.configuration.model_dump(mode="json"),
    }
    client.log_text(run_id, yaml.safe_dump(content, sort_keys=False), f"{CHAMPION}/{CHAMPION}.yaml")
    for place, path in _own_files(trial.configuration).items():
        log = client.log_artifacts if path.is_dir() else client.log_artifact
        log(run_id, str(path), f"{CHAMPION}/{place}")
    try:
        client.create_registered_model(
            name,
            description="The fastest configuration found for this pair; `lossless` says of each"
            " version whether it keeps the target's distribution.",
        )
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
    version = versions[0] if versions else None
    if version is None:
        timing = next((t for t in result.timings if t.config_id == config_id), None)
        version = client.create_model_version(
            name,
            source=f"{run.info.artifact_uri}/{CHAMPION}",
            run_id=run_id,
            tags={
                "config_id": config_id,
                "sweep": result.name,
                "lossless": str(trial.configuration.lossless).lower(),
            },
            description=trial.configuration.label
            + (f", {timing.speedup:.2f}× autoregressive decoding" if timing else "")
            + f"\n\n{described(trial.configuration)}",
        )
    client.set_registered_model_alias(name, CHAMPION, str(version.version))
    client.set_registered_model_tag(name, PROMOTED, str(time.time_ns()))
    return int(version.version)


def _logged(result: SweepResult, trial: Trial, client: MlflowClient) -> str:
    """The nested run of a configuration that was replayed and not notable then, made now."""
    if result.mlflow_run_id is None:
        raise UserError(f"sweep {result.name} was not logged to MLflow: {trial.id} has no run")
    try:
        experiment = client.get_run(result.mlflow_run_id).info.experiment_id
    except MlflowException:
        raise UserError(f"{tracking_uri()} has no run of sweep {result.name}") from None
    query = (
        f"tags.`mlflow.parentRunId` = '{result.mlflow_run_id}' and tags.config_id = '{trial.id}'"
    )
    return log_trial(
        client, experiment, result, trial, next(runs_where(client, experiment, query), None)
    )


def find_champion() -> tuple[PairSpec, Configuration, int] | None:
    """:func:`load_champion` of the one that was promoted last; None when there is none."""
    uri = tracking_uri()
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        return None
    if not any(CHAMPION in model.aliases for model in connect().search_registered_models()):
        return None
    return load_champion()


def load_champion(name: str | None = None) -> tuple[PairSpec, Configuration, int]:
    """The champion of the registered model `name`, or else the one that was promoted last: its
    pair, configuration and version. Raises :class:`UserError` when there is none."""
    none_yet = UserError(
        f"no champion{f' of {name}' if name else ''} in {tracking_uri()} yet; "
        "`specdec sweep` finds one, `specdec promote <config_id>` appoints one"
    )
    uri = tracking_uri()
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists():
        raise none_yet
    client = connect()
    try:
        if name is None:
            models = [m for m in client.search_registered_models() if CHAMPION in m.aliases]
            if not models:
                raise none_yet
            name = max(models, key=lambda m: int(m.tags.get(PROMOTED, 0))).name
        version = client.get_model_version_by_alias(name, CHAMPION)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise none_yet from None
        raise
    source = f"{CHAMPION}/{CHAMPION}.yaml"
    with tempfile.TemporaryDirectory() as scratch:
        file = client.download_artifacts(version.run_id, source, scratch)
        content = yaml.safe_load(Path(file).read_text())
        pair = parse(PairSpec, content["pair"], source)
        configuration = parse(Configuration, content["configuration"], source)
        for place, path in _own_files(configuration).items():
            if path.exists():
                continue
            # made elsewhere: it came with the champion
            files = Path(client.download_artifacts(version.run_id, f"{CHAMPION}/{place}", scratch))
            path.parent.mkdir(parents=True, exist_ok=True)
            if place.startswith("head"):
                shutil.copytree(files, path)
            else:
                shutil.copy(files / path.name, path)
    return pair, configuration, int(version.version)


def _own_files(configuration: Configuration) -> dict[str, Path]:
    """What a configuration needs of the workspace, by the artifact that holds a copy: the heads
    that it asks and the state that a bandit starts from; none of those that come with the program
    or are given by their path."""
    heads = dict.fromkeys(head for _, head in configuration.heads)
    own = [h for h in heads if not h.startswith("bundled:") and os.sep not in h]
    found = {f"head-{n}" if n > 1 else "head": resolve_head(h) for n, h in enumerate(own, start=1)}
    named = [s for s in dict.fromkeys(configuration.states) if Path(s).suffix != ".json"]
    found |= {f"state-{n}" if n > 1 else "state": find_state(s) for n, s in enumerate(named, 1)}
    return found


# Small things


def experiment_id_of(client: MlflowClient, name: str) -> str:
    """The id of the experiment `name`, created where it is missing."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        location = None
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            location = (workspace() / "mlartifacts" / name).as_uri()
        made = client.create_experiment(name, artifact_location=location)
        experiment = client.get_experiment(made)
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    present(client, experiment)
    return experiment.experiment_id


def runs_where(client: MlflowClient, experiment_id: str, query: str) -> Iterator[Run]:
    token = None
    while True:
        page = client.search_runs([experiment_id], query, page_token=token)
        yield from page
        if not (token := page.token):
            return


def _environment_tags(result: SweepResult) -> dict[str, str]:
    """Git commit, hardware and library versions."""
    tags = dict(result.environment)
    tags["mlflow.user"] = user_name()
    tags["mlflow.source.name"] = "specdec sweep"
    if commit := tags.get("git_commit"):
        tags["mlflow.source.git.commit"] = commit.removesuffix("-dirty")
    return tags


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def as_metrics(values: Mapping[str, float]) -> list[Metric]:
    now = int(time.time() * 1000)
    return [Metric(key, float(value), now, 0) for key, value in values.items()]


def as_params(values: Mapping[str, Any]) -> list[Param]:
    return [Param(key, str(value)) for key, value in _flat(values) if value is not None]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _timing(timing: Timing) -> dict[str, float]:
    return {
        "speedup": timing.speedup,
        "speedup_low": timing.low,
        "speedup_high": timing.high,
        "tokens_per_second": timing.tokens_per_second,
        "tied_with_champion": timing.tied_with_champion,
        "differing_outputs": timing.differing_outputs,
    }


def _summary(result: SweepResult) -> dict[str, float]:
    """What the parent run shows: the champion's figures, the baseline's, the oracles'."""
    values: dict[str, float] = {"configurations": len(result.trials)}
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
            values |= _timing(timing)
    if result.champion is not None:
        values |= result.champion_trial.metrics
    return values
