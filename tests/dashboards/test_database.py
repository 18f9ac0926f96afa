"""The MLflow store is made whole or not at all, in folders of any name. A database that MLflow
cannot use is one line that says what to do. No password is printed."""

import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import optuna
import pytest

from dashboards import store
from dashboards.database import in_background, prepare
from dashboards.store import connect, experiment_id_of, no_store
from dashboards.tracking.registry import load_champion
from jobs.console import console, print_runs_page
from specdec_core.base.errors import UserError
from specdec_core.base.uris import sqlite_uri, without_passwords
from specdec_core.servers.process import free_port
from tests.commands import ROOT, started

ODD = ["a%2Fb what? {50%}", "a:b@c #é %20"]
CONNECT = ("-c", "from dashboards.store import connect; connect()")
EARLIER = "451aebb31d03"  # a schema of MLflow's first versions
SPOILT = {
    "not a database": ("", "file is not a database; restore a copy of it, or move it away (mv "),
    "truncated": ("", "disk image is malformed; restore a copy of it, or move it away (mv "),
    "foreign": ("", "holds no tables of MLflow's; move it away (mv "),
    "newer": (
        "UPDATE alembic_version SET version_num = 'fedcba987654'",
        "wrote it (schema fedcba987654); use that one, or move it away (mv ",
    ),
    "begun": ("", "holds no tables of MLflow's; move it away (mv "),
    "half made": (
        f"UPDATE alembic_version SET version_num = '{EARLIER}'; DROP TABLE model_versions",
        "its making or an upgrade was interrupted: restore a copy of it, or move it away (mv ",
    ),
    "half upgraded": (
        f"UPDATE alembic_version SET version_num = '{EARLIER}';"
        "INSERT INTO registered_models (name) VALUES ('pair');"
        "CREATE TABLE _alembic_tmp_latest_metrics (a INT)",
        "its making or an upgrade was interrupted: restore a copy of it, or move it away (mv ",
    ),
    "older": (
        f"UPDATE alembic_version SET version_num = '{EARLIER}';"
        "INSERT INTO registered_models (name) VALUES ('pair')",
        "keep a copy of it, then run `mlflow db upgrade sqlite:///",
    ),
}


@pytest.fixture(autouse=True)
def seen_by_nothing_yet():
    prepare.cache_clear()


def test_processes_that_make_the_store_together_or_are_killed_leave_no_half_of_it(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    with started(tmp_path, *CONNECT) as killed:
        # In the middle of its migrations, in whichever file.
        while not any(file.stat().st_size > 100_000 for file in tmp_path.rglob("mlflow.db")):
            assert killed.poll() is None
            time.sleep(0.01)
        killed.kill()
    assert no_store()
    (tmp_path / "mlflow.db-journal").write_bytes(b"of a store that was deleted")
    with started(tmp_path, *CONNECT) as one, started(tmp_path, *CONNECT) as another:
        printed = one.communicate()[0], another.communicate()[0]
    assert (one.returncode, another.returncode) == (0, 0), printed
    assert [e.name for e in connect().search_experiments()] == ["Default"]
    assert {file.name for file in tmp_path.iterdir()} == {
        "mlflow.db",
        "mlflow.db.lock",
        ".specdec-places",
    }


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_or_foreign_store_is_one_line_that_says_what_to_do(kind, home):
    file = home / "mlflow.db"
    script, message = SPOILT[kind]
    if kind == "not a database":
        file.write_text("once upon a time " * 1000)
    elif kind == "truncated":
        file.write_bytes(file.read_bytes()[:300_000])
    elif kind == "foreign":
        file.unlink()
        script = "CREATE TABLE orders (id INT)"
    elif kind == "begun":
        file.unlink()
        script = "CREATE TABLE runs (id INT); DROP TABLE runs"
    if script:
        with closing(sqlite3.connect(file)) as database:
            database.executescript(script)
    before = file.read_bytes()
    with pytest.raises(UserError) as caught:
        load_champion()
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{file}: ")
    assert message in line
    assert file.read_bytes() == before


@pytest.mark.parametrize("name", ODD)
def test_a_workspace_may_have_any_name(name, empty_store, tmp_path, monkeypatch):
    home = tmp_path / name
    home.mkdir()
    monkeypatch.setenv("SPECDEC_HOME", str(home))
    assert no_store()
    shutil.copy(empty_store, home / "mlflow.db")
    assert not no_store()
    client = connect()
    run = client.create_run(experiment_id_of(client, "pair")).info
    client.log_text(run.run_id, "text", "folder/file.txt")
    assert Path(client.download_artifacts(run.run_id, "folder/file.txt")).read_text() == "text"
    (artifact,) = home.rglob("file.txt")
    assert artifact.is_relative_to(home / "mlartifacts" / "pair")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.RDBStorage(sqlite_uri(home / "optuna.db"))
    optuna.create_study(storage=storage, study_name="study")
    assert (home / "optuna.db").is_file()
    assert list(tmp_path.iterdir()) == [home]


@pytest.mark.parametrize(
    ("uri", "package"),
    [
        ("postgresql+psycopg2://bob:s3cret@db/mlflow", "psycopg2-binary"),
        ("mysql+pymysql://bob:s3cret@db/mlflow", "pymysql"),
    ],
)
def test_a_missing_driver_is_named_with_what_installs_it(uri, package, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setitem(sys.modules, uri.partition("+")[2].partition(":")[0], None)
    with pytest.raises(UserError, match=f"driver is not installed: pip install {package}$"):
        connect()


def test_an_address_without_a_number_of_a_port_is_one_line(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql+psycopg2://bob:s3cret@db:port/mlflow")
    with pytest.raises(UserError, match=r"^postgresql\+psycopg2://db:port/mlflow: no valid URI"):
        connect()


@pytest.fixture
def silent():
    """The host and port of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_does_not_answer_is_one_line_in_bounded_time(silent, monkeypatch):
    monkeypatch.setattr(store, "SECONDS", 0.2)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{silent}")
    with pytest.raises(UserError, match=rf"^http://{silent} .*: no answer in 0.2 seconds$"):
        connect()
    connect(patient=True)
    with pytest.raises(TimeoutError):
        in_background(lambda: time.sleep(60)).result(0.1)


def test_a_password_is_not_in_the_error_of_a_server_that_is_away(monkeypatch):
    host = f"127.0.0.1:{free_port()}"
    uri = f"http://bob:s3cret@{host}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match=f"^http://{host} .*cannot be used: API req") as caught:
        load_champion()
    assert "s3cret" not in str(caught.value)


def test_a_password_is_not_in_the_traceback_of_a_fault():
    program = (
        "from jobs.console import run\ndef main():\n"
        "    try: raise ValueError('http://bob:s3cret@host/a')\n"
        "    except ValueError as error: raise KeyError('pg://bob:s3/c@ret@db/a') from error"
        "\nrun(main)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "ValueError: http://host/a" in done.stderr
    assert "KeyError: 'pg://db/a'" in done.stderr


@pytest.mark.filterwarnings("ignore:Query string")
def test_the_command_that_shows_runs_has_no_password(home, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home}/mlflow.db?timeout=9&token=s3cret")
    with console.capture() as printed:
        print_runs_page("pair")
    assert 'ui --backend-store-uri "$MLFLOW_TRACKING_URI"\n' in printed.get()
    assert "s3cret" not in printed.get()


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://bob:s3cret@host:5000/a", "http://host:5000/a"),
        ("postgresql+psycopg2://bob:p@s3cret@db:5432/x", "postgresql+psycopg2://db:5432/x"),
        ("postgresql://bob:s3/cr?e#t@db/x", "postgresql://db/x"),
        ("https://s3crettoken@host/x", "https://host/x"),
        ("postgresql:///db?user=b&password=s3cret&a=b", "postgresql:///db?user=b&password=***&a=b"),
        ("http://host:8000/users/a@b", "http://host:8000/users/a@b"),
        ("http://[::1]:5000/a@b", "http://[::1]:5000/a@b"),
        ("sqlite:////home/a:b@c/mlflow.db", "sqlite:////home/a:b@c/mlflow.db"),
    ],
)
def test_a_uri_is_shown_without_what_is_secret_in_it(uri, shown):
    assert without_passwords(f"before {uri} '{uri}' after") == f"before {shown} '{shown}' after"
    assert str(UserError(f"{uri}: no")) == f"{shown}: no"
