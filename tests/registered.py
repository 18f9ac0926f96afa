"""A registry with champions, shared by the tests of what follows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

from dashboards.store import connect, experiment_id_of
from dashboards.tracking.registry import SOURCE, appoint
from specdec_core.config import Configuration, PairSpec


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Making its tables takes seconds, so it is made once and copied."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def home(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace with an empty MLflow store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    (tmp_path / "mlflow.db").write_bytes(empty_store.read_bytes())
    return tmp_path


def appointed(spec: PairSpec, configuration: Configuration) -> None:
    """It is a version of the pair's registered model, and the champion."""
    client = connect()
    run = client.create_run(experiment_id_of(client, spec.name)).info
    content = {"pair": spec, "configuration": configuration}
    dumped = {key: value.model_dump(mode="json") for key, value in content.items()}
    client.log_text(run.run_id, yaml.safe_dump(dumped), SOURCE)
    if not client.search_registered_models():
        client.create_registered_model(spec.name)
    version = client.create_model_version(spec.name, run.artifact_uri, run.run_id)
    appoint(spec.name, int(version.version))
