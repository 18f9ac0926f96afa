"""A workspace's MLflow store works wherever the workspace lies.

MLflow keeps places as absolute addresses. In a workspace that was moved, copied or mounted
elsewhere these are another folder's: they are led to the present one when the store is opened.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from specdec_core.base.errors import UserError

FOLDER = "specdec.folder"  # tag of a run that is taken up again: host and folder
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


def relocate(database: Path, home: Path) -> list[Path]:
    """Lead to `home`, the workspace of the store `database`, what the store says of other folders:
    addresses of artifacts, and the folders of runs. Returns the folders where the workspace was.

    Processes must not use a store by several paths at the same time.

    Raises:
        UserError: the store cannot be written.
    """
    formers = set()
    try:
        with closing(sqlite3.connect(database, timeout=_PATIENCE)) as store, store:
            experiments = store.execute("SELECT name, artifact_location FROM experiments")
            for name, old in experiments.fetchall():
                inside = artifacts_of(Path("/"), name).removeprefix("file://")
                new = artifacts_of(home, name)
                if old != new and old.endswith(inside):
                    former = Path(url2pathname(urlsplit(old.removesuffix(inside)).path))
                    _lead_folders(store, old, former, home)
                    _lead_addresses(store, old, new)
                    formers.add(former)
    except sqlite3.Error as error:
        raise UserError(f"{database}: cannot be led to its new place {home}: {error}") from None
    return sorted(formers)


def _lead_folders(store: sqlite3.Connection, address: str, former: Path, home: Path) -> None:
    """Lead the folders of the runs with artifacts at `address`."""
    old, new = (f":{folder}/".replace("'", "_") for folder in (former, home))
    store.execute(
        "UPDATE tags SET value = replace(value, ?, ?) WHERE key = ? AND run_uuid IN"
        " (SELECT run_uuid FROM runs WHERE substr(artifact_uri, 1, ?) = ?)",
        (old, new, FOLDER, len(address) + 1, f"{address}/"),
    )


def _lead_addresses(store: sqlite3.Connection, old: str, new: str) -> None:
    """Lead `old` and the addresses within to `new`."""
    for table, column in _ADDRESSES:
        store.execute(
            f"UPDATE {table} SET {column} = ? || substr({column}, ?)"
            f" WHERE substr({column} || '/', 1, ?) = ?",
            (new, len(old) + 1, len(old) + 1, f"{old}/"),
        )
