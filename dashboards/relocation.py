"""A workspace's MLflow store works wherever the workspace lies.

MLflow keeps places as absolute addresses. In a workspace that was moved, copied or mounted
elsewhere these are another folder's: they are led to the present one when the store is opened.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from specdec_core.base.errors import UserError

_PATIENCE = 60.0  # seconds to wait while another process writes to the store
# Columns with the address of an experiment's artifacts, or of some of them.
_ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def artifacts_of(home: Path, experiment: str) -> str:
    """The address of an experiment's artifacts in the workspace `home`."""
    return (home / "mlartifacts" / experiment).as_uri()


def relocate(database: Path, home: Path) -> None:
    """Lead the addresses of artifacts in the store `database` to its workspace `home`.

    Processes must not use a store by several paths at the same time.

    Raises:
        UserError: the store cannot be written.
    """
    try:
        with closing(sqlite3.connect(database, timeout=_PATIENCE)) as store, store:
            experiments = store.execute("SELECT name, artifact_location FROM experiments")
            for name, old in experiments.fetchall():
                inside = artifacts_of(Path("/"), name).removeprefix("file://")
                new = artifacts_of(home, name)
                if old != new and old.endswith(inside):
                    _lead_addresses(store, old, new)
    except sqlite3.Error as error:
        raise UserError(f"{database}: cannot be led to its new place {home}: {error}") from None


def _lead_addresses(store: sqlite3.Connection, old: str, new: str) -> None:
    """Lead `old` and the addresses within to `new`."""
    for table, column in _ADDRESSES:
        store.execute(
            f"UPDATE {table} SET {column} = ? || substr({column}, ?)"
            f" WHERE substr({column} || '/', 1, ?) = ?",
            (new, len(old) + 1, len(old) + 1, f"{old}/"),
        )
