"""A workspace's store works wherever the workspace lies: moved, copied, or mounted elsewhere."""

import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.tracking._tracking_service import utils

from dashboards.relocation import FOLDER
from dashboards.store import connect, experiment_id_of, own_store, place_of
from dashboards.tracking.registry import load_champion
from dashboards.tracking.sweep_run import SweepRun
from specdec_core.base.errors import UserError
from specdec_core.prompts.prompt_sets import Prompt
from tests.registered import runs_in

PROMPTS = [Prompt("a", "def f(x):")]
Open = Callable[[Path], None]


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
    """All places that the store gives."""
    client = connect()
    experiments = [e for e in client.search_experiments() if e.name != "Default"]
    runs = client.search_runs([e.experiment_id for e in experiments])
    versions = client.search_model_versions()
    given = [
        *(e.artifact_location for e in experiments),
        *(run.info.artifact_uri for run in runs),
        *(version.source for version in versions),
        *(client.get_model_version_download_uri(v.name, v.version) for v in versions),
    ]
    folders = [run.data.tags[FOLDER] for run in runs if FOLDER in run.data.tags]
    return [*given, *(folder.partition(":")[2] for folder in folders)]


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
    logged = SweepRun()
    logged.begun(again, PROMPTS, folder)
    logged.finish(again, folder)
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
