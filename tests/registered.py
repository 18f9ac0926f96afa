"""A registry with champions, and a sweep, shared by the tests of what follows them."""

from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run

from dashboards.store import connect, experiment_id_of
from dashboards.tracking.certificates import model_of
from dashboards.tracking.registry import SOURCE, _create_model, appoint
from specdec_core.config import AUTOREGRESSIVE, Configuration, PairSpec
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.search.results import SweepResult, Trial
from specdec_core.tokens.statistics import Counts
from tests.configurations import SUFFIX
from tests.specdec_core.cost.examples import constant_profile

SWEEP = "two"


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """Making its tables takes seconds, so it is made once and copied."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def bare_home(tmp_path, monkeypatch):
    """An empty workspace."""
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def home(empty_store, bare_home):
    """A workspace with an empty MLflow store."""
    (bare_home / "mlflow.db").write_bytes(empty_store.read_bytes())
    return bare_home


def appointed(spec: PairSpec, configuration: Configuration, server: str | None = None) -> None:
    """It is a version of the pair's registered model in a server, and the champion."""
    client = connect()
    run = client.create_run(experiment_id_of(client, spec.name)).info
    content = {"pair": spec, "configuration": configuration}
    dumped = {key: value.model_dump(mode="json") for key, value in content.items()}
    client.log_text(run.run_id, yaml.safe_dump(dumped), SOURCE)
    name = model_of(spec.name, server)
    _create_model(client, name, server)
    version = client.create_model_version(name, run.artifact_uri, run.run_id)
    appoint(name, int(version.version))


@pytest.fixture
def swept(bare_home):
    """A workspace with a sweep of two configurations, autoregressive decoding and `SUFFIX`."""
    profile = constant_profile(0.01, 0.001, "small", device="made up")
    forwards = {"n": 64, "n_target": 64, "n_target_tokens": 64}  # of the target alone
    drafted = dict.fromkeys(("n_draft", "n_discarded", "n_drafted", "n_accepted"), 0)
    counts = Counts(1, **forwards, **drafted)
    result = SweepResult(
        name=SWEEP, started="2026-11-21T09:00:00Z", max_new_tokens=64, profile=profile,
        pair=PairSpec(), prompts=PromptSet(source="s", count=1, digest="0"),
        trials=[Trial.of(each, counts, profile, 64) for each in (AUTOREGRESSIVE, SUFFIX)],
    )  # fmt: skip
    result.save(bare_home / "sweeps" / SWEEP)
    return bare_home


def runs_in(home: Path) -> tuple[MlflowClient, list[Run], list[Run]]:
    """A client of the workspace's store, all runs that have no parent, and the nested ones."""
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    experiments = [e.experiment_id for e in client.search_experiments() if e.name != "Default"]
    runs = client.search_runs(experiments)
    nested = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    return client, [run for run in runs if run not in nested], nested
