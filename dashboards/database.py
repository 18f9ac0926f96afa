"""The database of the MLflow store. A SQLite file is made whole or not at all: MLflow's own
migration of a new file leaves half of the tables when it is interrupted, or when two processes make
them. Any database is looked at before MLflow opens it, because MLflow tries that for minutes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from threading import Thread
from typing import TypeVar

import mlflow.store.db_migrations
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from mlflow import MlflowClient
from mlflow.store.db.db_types import DATABASE_ENGINES
from sqlalchemy import NullPool, create_engine, inspect, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from specdec_core.base.errors import UserError
from specdec_core.base.files import alone, atomic_path
from specdec_core.base.uris import sqlite_uri, without_passwords

Answer = TypeVar("Answer")

SECONDS = 30.0  # that a store may take to answer: longer than two more tries over HTTP
_DRIVERS = {"psycopg": "'psycopg[binary]'", "psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}


def is_database(uri: str) -> bool:
    """Whether MLflow opens the store itself, without a tracking server."""
    return uri.partition(":")[0].partition("+")[0] in DATABASE_ENGINES


def sqlite_file(uri: str) -> Path | None:
    """The file of a SQLite URI; None where it names another kind of store, or none on disk."""
    if not uri.startswith("sqlite"):
        return None
    try:
        url = make_url(uri)
    except (ArgumentError, ValueError):
        return None
    in_memory = url.database in (None, "", ":memory:") or "uri" in url.query
    return None if in_memory else Path(url.database or "")


def missing(file: Path) -> bool:
    """Whether a SQLite file is not there yet, or has nothing in it."""
    return not file.exists() or file.stat().st_size == 0


@cache  # a store that was sound is not looked at again
def prepare(uri: str) -> None:
    """Make the store where it is a SQLite file that is missing. Raises :class:`UserError` where
    MLflow cannot use the database, with what to do."""
    file = sqlite_file(uri)
    where, another = without_passwords(uri), "name another with MLFLOW_TRACKING_URI"
    if file is not None:
        away = shlex.join(["mv", str(file), f"{file}.old"])
        where, another = str(file), f"move it away ({away}), and the same command makes a new one"
    try:
        if file is not None and missing(file):
            _make(file)
        fault = in_background(lambda: _fault(uri, another)).result(SECONDS)
    except ModuleNotFoundError as error:
        package = _DRIVERS.get(error.name or "", error.name)
        raise UserError(f"{where}: its driver is not installed: pip install {package}") from None
    except TimeoutError:
        raise UserError(f"{where}: no answer in {SECONDS:g} seconds") from None
    except UserError:
        raise
    except (ArgumentError, ValueError) as error:
        raise UserError(f"{where}: no valid URI of a database") from error
    except (OSError, SQLAlchemyError, CommandError) as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        broken = file is not None and ("malformed" in reason or "not a database" in reason)
        advice = f"; restore a copy of it, or {another}" if broken else ""
        raise UserError(f"{where}: cannot be used: {reason}{advice}") from error
    if fault is not None:
        raise UserError(f"{where}: {fault}")


def _make(file: Path) -> None:
    file = file.resolve()  # not in place of a link
    with alone(file):
        if not missing(file):  # another process has made it meanwhile
            return
        for rest in ("-journal", "-wal", "-shm"):  # of a file that was deleted: SQLite would use it
            file.with_name(file.name + rest).unlink(missing_ok=True)
        with atomic_path(file) as temporary:
            MlflowClient(sqlite_uri(temporary)).search_experiments(max_results=1)


def _fault(uri: str, another: str) -> str | None:
    """What is wrong with the database, if anything, and what to do; `another` is to use another."""
    # Writers of a SQLite file may take seconds.
    waiting = {"timeout": 20} if uri.startswith("sqlite") else {}
    engine = create_engine(uri, poolclass=NullPool, connect_args=waiting)
    with engine.connect() as connection:
        tables = inspect(connection).get_table_names()
        revision = MigrationContext.configure(connection).get_current_revision()
    scripts = ScriptDirectory(str(Path(mlflow.store.db_migrations.__file__).parent))
    if revision == scripts.get_current_head():
        return None
    if not tables and sqlite_file(uri) is None:
        return None  # a server's, which MLflow fills
    if "experiments" not in tables:
        return f"holds no tables of MLflow's; {another}"
    known = {script.revision for script in scripts.walk_revisions()}
    if revision is not None and revision not in known:
        return (
            f"a newer MLflow than {mlflow.__version__} wrote it (schema {revision}); use that"
            f" one, or {another}"
        )
    return (
        f"an earlier MLflow wrote it (schema {revision}); keep a copy of it, then run"
        f" `mlflow db upgrade {in_shell(uri)}`; where that fails, its making or an upgrade was"
        f" interrupted: restore a copy of it, or {another}"
    )


def in_shell(uri: str) -> str:
    """How to name the store in a shell without showing a password."""
    return shlex.quote(uri) if without_passwords(uri) == uri else '"$MLFLOW_TRACKING_URI"'


def in_background(call: Callable[[], Answer]) -> Future[Answer]:
    """The coming result of `call`, for which a limit can be set: some drivers have none. The
    process may end before it has come."""
    answer: Future[Answer] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=work, daemon=True).start()
    return answer
