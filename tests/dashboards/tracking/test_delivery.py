"""A tracking server that is away for a while misses nothing and holds nothing up."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from mlflow import MlflowClient

from dashboards.tracking import delivered_run
from dashboards.tracking.delivered_run import Undelivered
from dashboards.tracking.delivery import Delivery
from dashboards.tracking.registry import load_champion
from dashboards.tracking.sweep_run import SweepRun
from jobs.console import print_runs_page
from specdec_core.base.observer import Observer
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.search.results import SweepResult

PROMPTS = [Prompt("a", "def f(x):")]


class Heard(Observer):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warned(self, message: str) -> None:
        self.warnings.append(message)


@contextmanager
def server(folder: Path, port: int) -> Iterator[None]:
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
            deadline = time.monotonic() + 120
            while not answers(port):
                assert process.poll() is None, (folder / "server.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (URLError, TimeoutError):  # it is not there, or still busy with starting
        return False


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Where a tracking server is expected, though none is there yet."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    return port


@pytest.mark.long
def test_what_a_killed_server_missed_is_delivered_when_it_is_back(
    swept: tuple[SweepResult, Path], port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, folder = swept[0].model_copy(deep=True), swept[1]
    monkeypatch.setattr(delivered_run, "PATIENCE", 1.0)
    trials = result.trials
    counting = result.model_copy(update={"trials": trials[:2], "champion": None})
    heard = Heard()

    def sweep() -> None:
        with SweepRun(heard) as run:
            with server(tmp_path, port):
                run.begun(counting, PROMPTS, folder)
                assert run.delivery.settle(60) == 0
            counting.trials = trials
            for trial in trials[2:]:
                run.trial_finished(trial)
            run.counted(counting)
            result.mlflow_run_id = counting.mlflow_run_id
            run.finish(result, folder)

    with pytest.raises(Undelivered, match=r"cannot be reached, 8 entries wait .*same command"):
        sweep()
    assert "cannot be reached" in heard.warnings[0]

    with server(tmp_path, port):
        monkeypatch.setattr(delivered_run, "PATIENCE", 60.0)
        with SweepRun() as again:
            again.begun(result, PROMPTS, folder)
            assert again.finish(result, folder) == 1
        client = MlflowClient()
        runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
        champion = load_champion(result.pair.name)[1]
    assert {run.info.status for run in runs} == {"FINISHED"}
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    nested = {run.data.tags["config_id"]: run for run in runs if run is not parent}
    assert len(runs) == 1 + len(nested)
    assert nested.keys() == {trial.id for trial in trials}
    for trial in trials:
        assert nested[trial.id].data.metrics.items() >= trial.metrics.items()
    assert champion == result.champion_trial.configuration


@pytest.mark.long
def test_a_servers_password_is_in_no_file_no_run_and_no_output(
    swept: tuple[SweepResult, Path],
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    result, folder = swept[0].model_copy(deep=True), tmp_path / "sweep"
    shutil.copytree(swept[1], folder)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://bob:s3cret@127.0.0.1:{port}")
    with server(tmp_path, port):
        with SweepRun() as run:
            run.begun(result, PROMPTS, folder)
            assert run.finish(result, folder) == 1
        print_runs_page(result.pair.name)
    printed = capfd.readouterr()
    assert f"http://127.0.0.1:{port}/#/experiments/" in printed.out
    assert "s3cret" not in printed.out + printed.err
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert tmp_path / "mlflow.db" in files
    assert not [file for file in files if b"s3cret" in file.read_bytes()]


def test_a_job_that_the_store_did_not_take_is_done_again_and_any_other_error_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[int] = []
    failures = [ConnectionError("away"), ConnectionError("away")]

    def job(number: int) -> None:
        if number == 1 and failures:
            raise failures.pop()
        done.append(number)

    delivery = Delivery()
    monkeypatch.setattr("dashboards.tracking.delivery.RETRY_SECONDS", 0.01)
    for number in range(3):
        delivery.put(lambda number=number: job(number))
    steps: list[None] = []
    assert delivery.settle(10, step=lambda: steps.append(None)) == 0
    assert done == [0, 1, 2]
    assert len(steps) <= 3

    delivery.put(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        delivery.settle(10)

    delivery.put(lambda: done.append(3))  # a settled one rests
    time.sleep(0.05)
    assert done == [0, 1, 2]
    assert delivery.settle(10) == 0
    assert done == [0, 1, 2, 3]
    delivery.close()
