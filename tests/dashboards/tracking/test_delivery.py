"""A tracking server that is away gets a sweep by the same command, and keeps its password."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from mlflow import MlflowClient

from dashboards.outputs.mlflow_runs import Undelivered
from dashboards.tracking.registry import load_champion
from jobs.console import print_runs_page
from specdec_core.servers.process import free_port
from tests.commands import wait_until
from tests.dashboards.tracking.test_sweep_run import log


@contextmanager
def server(folder, port):
    """A tracking server of the store in `folder`, killed at the end."""
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    with (
        (folder / "server.log").open("w") as log,
        subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as process,
    ):
        try:
            wait_until(lambda: process.poll() is not None or answers(port))
            assert process.poll() is None, (folder / "server.log").read_text()
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def answers(port):
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (URLError, TimeoutError):  # it is not there, or still busy with starting
        return False


@pytest.fixture
def port(bare_home, monkeypatch):
    """Where a tracking server is expected, though none is there yet."""
    port = free_port()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    return port


@pytest.mark.long
def test_what_a_server_that_is_away_missed_is_logged_by_the_same_sweep_and_its_password_nowhere(
    swept, port, tmp_path, monkeypatch, capfd
):
    result, folder = swept[0].model_copy(deep=True), tmp_path / "sweep"
    shutil.copytree(swept[1], folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://bob:s3cret@127.0.0.1:{port}")
    with pytest.raises(Undelivered, match=r"cannot be used.*results are in .*same command logs"):
        log(result, folder)
    with server(tmp_path, port):
        assert log(result, folder) == 1
        print_runs_page(result.pair.name)
        client = MlflowClient()
        runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
        champion = load_champion()[1]
    assert {run.info.status for run in runs} == {"FINISHED"}
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    nested = {run.data.tags["config_id"]: run for run in runs if run is not parent}
    assert nested.keys() == {trial.id for trial in result.trials}
    for trial in result.trials:
        assert nested[trial.id].data.metrics.items() >= trial.metrics.items()
    assert champion == result.champion_trial.configuration

    printed = capfd.readouterr()
    assert f"http://127.0.0.1:{port}/#/experiments/" in printed.out
    assert "s3cret" not in printed.out + printed.err
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert tmp_path / "mlflow.db" in files
    assert not [file for file in files if b"s3cret" in file.read_bytes()]
