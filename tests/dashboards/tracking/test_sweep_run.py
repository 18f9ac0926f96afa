"""Sweeps are logged once, and found wherever their workspace lies."""

import platform
import shutil
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.tracking._tracking_service import utils

from dashboards.store import (
    FOLDER,
    connect,
    experiment_id_of,
    own_store,
    place_of,
    tracking_uri,
)
from dashboards.tracking.registry import load_champion, register
from dashboards.tracking.sweep_run import SweepRun
from specdec_core.base.errors import UserError
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.prompts.prompt_sets import Prompt
from tests.registered import runs_in

PROMPTS = [Prompt("a", "def f(x):"), Prompt("b", "import os")]


def log(result, folder):
    """Log a sweep that has ended; returns the registered version."""
    tracking = SweepRun()
    tracking.begun(result, PROMPTS, folder)
    return tracking.finish(result, folder)


def test_a_sweep_is_a_parent_run_with_a_nested_run_for_each_configuration(home, result, folder):
    assert tracking_uri() == f"sqlite:///{home / 'mlflow.db'}"
    before = mlflow.get_tracking_uri()
    log(result, folder)
    client, (parent,), nested = runs_in(home)
    assert parent.info.run_id == result.mlflow_run_id
    assert {run.info.status for run in (parent, *nested)} == {"FINISHED"}
    assert {run.data.tags["config_id"] for run in nested} == {t.id for t in result.trials}
    assert {run.data.tags["mlflow.parentRunId"] for run in nested} == {parent.info.run_id}
    for run in nested:
        trial = result.trial(run.data.tags["config_id"])
        assert run.data.metrics.items() >= (trial.metrics | trial.counts).items()
        assert run.data.tags["lossless"] == "true"
        assert run.data.tags["prompts_digest"] == result.prompts.digest
        assert run.data.tags["python"] == result.environment["python"]
    fixed = next(run for run in nested if run.info.run_name.endswith(", K=5"))
    assert fixed.data.params["drafter.policy.max_tokens"] == "5"
    note = fixed.data.tags["mlflow.note.content"]
    sentence = result.trial(fixed.data.tags["config_id"]).configuration.sentence
    assert note.startswith(f"{sentence}\n\n```yaml\ndrafter:\n")
    assert fixed.data.params["sampling.temperature"] == "0.0"
    files = {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert files >= {"sweep.json", "rounds.parquet"}
    assert Path(parent.info.artifact_uri.removeprefix("file://")).is_relative_to(home)
    (dataset,) = parent.inputs.dataset_inputs
    assert dataset.dataset.digest == result.prompts.digest[:36]
    best = next(t for t in result.timings if t.config_id == result.champion)
    assert parent.data.metrics["speedup"] == best.speedup
    timed = {r.data.tags["config_id"] for r in nested if "tokens_per_second" in r.data.metrics}
    assert timed == {t.config_id for t in (result.autoregressive, *result.timings) if t}
    assert mlflow.get_tracking_uri() == before  # the global store is left alone
    again = result.model_copy(update={"mlflow_run_id": None})
    log(again, folder)
    assert len(runs_in(home)[1]) == 1  # read before another process logged it
    again.model_copy(update={"mlflow_run_id": None}).save(folder)
    log(again, folder)
    assert len(runs_in(home)[1]) == 2  # run anew, it is another parent


def test_a_logging_that_was_interrupted_is_replaced_by_the_same_sweep(home, result, folder):
    """The process ended while it logged the second configuration: both runs stay open."""
    client = MlflowClient(tracking_uri())
    experiment_id = experiment_id_of(client, result.pair.name)
    begun = client.create_run(experiment_id, tags={FOLDER: place_of(folder)}).info.run_id
    for tags in ({"config_id": "a"}, {"config_id": "b"}):
        client.create_run(experiment_id, tags={"mlflow.parentRunId": begun, **tags})
    log(result, folder)
    _, (parent,), nested = runs_in(home)
    assert parent.info.run_id != begun
    assert {run.info.status for run in (parent, *nested)} == {"FINISHED"}
    assert len(nested) == len(result.trials)


def test_a_store_that_cannot_be_used_is_one_line(home, result, folder, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://store")
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI"):
        log(result, folder)


# Replayed


def replayed(result, more):
    """The sweep as if it had replayed its fixed K, and `more` of them."""
    model = next(t for t in result.trials if t.configuration.family == "fixed")
    for trial in result.trials:
        trial.replayed = trial.configuration.family == "fixed"
    for number in range(more):
        policy = FixedSettings(max_tokens=20 + number)
        drafter = model.configuration.drafter.model_copy(update={"policy": policy})
        configuration = model.configuration.model_copy(update={"drafter": drafter})
        slow = model.metrics | {"estimated_speedup": 0.5 - number / 1000}
        update = {"configuration": configuration, "metrics": slow}
        result.trials.append(model.model_copy(update=update, deep=True))
    return result


def test_of_many_replayed_configurations_the_notable_are_runs_and_all_are_in_a_table(
    home, result, folder
):
    result = replayed(result, more=60)
    log(result, folder)
    _, (parent,), nested = runs_in(home)
    logged = {run.data.tags["config_id"]: run for run in nested}
    live = {t.id for t in result.trials if not t.replayed}
    assert live <= logged.keys()
    timed = {t.config_id for t in result.timings}
    assert logged.keys() == live | timed | {t.id for t in result.notable()}
    assert len(logged) < len(result.trials)
    for config_id, run in logged.items():
        assert run.data.tags["counted"] == ("live" if config_id in live else "replay")
    table = mlflow.artifacts.load_text(f"{parent.info.artifact_uri}/configurations.csv")
    assert len(table.splitlines()) == 1 + len(result.trials)

    left = next(t for t in result.trials if t.id not in logged)
    register(result, left.id)
    assert load_champion()[1] == left.configuration
    assert left.id in {run.data.tags["config_id"] for run in runs_in(home)[2]}


def test_what_was_timed_has_a_run_however_slow_its_estimate_has_become(home, result, folder):
    result = replayed(result, more=60)
    timed = [result.trial(t.config_id) for t in result.timings if t.config_id != result.champion]
    slow = next(trial for trial in timed if trial.replayed)
    slow.metrics["estimated_speedup"] = 0.01
    assert slow not in result.notable()
    log(result, folder)
    [run] = [run for run in runs_in(home)[2] if run.data.tags["config_id"] == slow.id]
    assert run.data.metrics["tokens_per_second"] > 0


def test_what_is_estimated_for_another_machine_is_not_registered(home, result, folder):
    result = result.model_copy(
        update={"hardware": "far away", "timings": [], "autoregressive": None}
    )
    assert log(result, folder) is None
    _, (parent,), _ = runs_in(home)
    assert parent.data.tags["estimated_for"] == "far away"
    assert parent.data.tags["champion"] == result.champion
    with pytest.raises(UserError, match="no champion"):
        load_champion()


def test_what_was_chosen_for_all_loads_is_registered(home, under_load, folder):
    result = under_load.model_copy(deep=True)
    choice = result.under_load
    assert choice.chosen.family == "schedule"
    version = log(result, folder)
    assert load_champion()[1:] == (choice.chosen, version)
    client, (parent,), _ = runs_in(home)
    assert parent.data.tags["champion"] == choice.chosen.id
    metrics = parent.data.metrics
    assert metrics["alone_speedup"] > 0  # of another configuration
    assert "speedup" not in metrics
    assert metrics["simulation_error_value"] == pytest.approx(choice.errors()["value"])
    steps = client.get_metric_history(parent.info.run_id, "load_speedup")
    assert {metric.step for metric in steps} == {1, 8}
    registered = client.get_model_version_by_alias(result.pair.name, "champion")
    assert "8 clients: autoregressive" in registered.description


@pytest.fixture
def opened(monkeypatch):
    """Have this process use another workspace, as a new process would."""

    def use(home):
        monkeypatch.setenv("SPECDEC_HOME", str(home))
        utils._artifact_repos_cache.clear()

    return use


@pytest.fixture(scope="module")
def made(empty_store, swept, tmp_path_factory):
    """A workspace in which a sweep was logged, and the logging of another one, `killed`, was begun:
    where it was made, and where it is kept for the tests."""
    place = tmp_path_factory.mktemp("made") / "wor'k space é#"
    place.mkdir()
    shutil.copy(empty_store, place / "mlflow.db")
    result, files = swept
    for name in ("sweep", "killed"):
        shutil.copytree(files, place / "sweeps" / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(place))
        go_on(result, place / "sweeps" / "sweep")
        begin(result, place / "sweeps" / "killed")
    return place, place.rename(place.with_name("kept"))


@pytest.fixture
def moved(made, opened, tmp_path, monkeypatch):
    """The workspace, at another place than it was made."""
    place = shutil.copytree(made[1], tmp_path / "second")
    opened(place)
    return place


def addresses():
    """All addresses that the store gives."""
    client = connect()
    experiments = [e for e in client.search_experiments() if e.name != "Default"]
    runs = client.search_runs([e.experiment_id for e in experiments])
    versions = client.search_model_versions()
    return [
        *(e.artifact_location for e in experiments),
        *(run.info.artifact_uri for run in runs),
        *(version.source for version in versions),
        *(client.get_model_version_download_uri(v.name, v.version) for v in versions),
    ]


def tree(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def begin(result, folder):
    """Begin to log a sweep, as a process that is killed meanwhile."""
    client = connect()
    experiment_id = experiment_id_of(client, result.pair.name)
    client.create_run(experiment_id, tags={FOLDER: place_of(folder)})


def go_on(result, folder):
    """Log a sweep to its end; returns its run."""
    again = result.model_copy(update={"mlflow_run_id": None}, deep=True)
    log(again, folder)
    return again.mlflow_run_id


def test_a_moved_workspace_loads_its_champion_and_makes_no_old_folder_again(made, moved, swept):
    found = load_champion()
    assert found.configuration == swept[0].champion_trial.configuration
    assert all(str(moved) in address for address in addresses())
    shutil.copytree(moved / "sweeps" / "sweep", moved / "sweeps" / "sweep-2")
    again = go_on(swept[0], moved / "sweeps" / "sweep-2")
    assert list((moved / "mlartifacts").glob(f"*/{again}/artifacts/configurations.csv"))
    assert not made[0].exists()


def test_a_moved_workspace_replaces_the_run_of_a_killed_sweep_on_another_machine_too(
    moved, swept, monkeypatch
):
    connect()  # leads it
    assert sorted(run.info.status for run in runs_in(moved)[1]) == ["FINISHED", "RUNNING"]
    monkeypatch.setattr(platform, "node", lambda: "another-machine")
    go_on(swept[0], moved / "sweeps" / "killed")
    assert [run.info.status for run in runs_in(moved)[1]] == ["FINISHED", "FINISHED"]


def test_a_copy_writes_nothing_into_the_original(moved, swept, opened):
    connect()
    original = tree(moved)
    copy = shutil.copytree(moved, moved.with_name("third"))
    opened(copy)
    load_champion()
    go_on(swept[0], copy / "sweeps" / "killed")
    assert all(str(copy) in address for address in addresses())
    assert tree(moved) == original
    opened(moved)
    assert all(str(moved) in address for address in addresses())


def test_a_workspace_in_a_folder_at_its_former_place_is_led_once(made, opened, monkeypatch):
    place, kept = made
    opened(shutil.copytree(kept, place / "inner"))
    led = addresses()
    assert {address.count("/inner/") for address in led} == {1}
    assert addresses() == led
    shutil.rmtree(place)


def test_a_store_named_by_its_uri_is_led_too(moved, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{moved / 'mlflow.db'}")
    assert own_store()
    load_champion()


def test_a_champion_whose_artifacts_were_left_behind_is_one_line(moved):
    shutil.rmtree(moved / "mlartifacts")
    with pytest.raises(UserError, match=r"version 1 of .*: no champion/champion\.yaml in .*second"):
        load_champion()
