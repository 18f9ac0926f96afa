"""Which trained heads and datastores configurations read, beside models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from specdec_core.config import Configuration
from specdec_core.drafting.datastores import card as datastore
from specdec_core.drafting.datastores.datastore import resolve_datastore
from specdec_core.drafting.heads.storage import CARD, WEIGHTS, resolve_head
from specdec_core.models.digests import add_files

HEAD_FILES: tuple[str, ...] = (CARD, WEIGHTS)
DATASTORE_FILES: tuple[str, ...] = (
    datastore.CARD,
    datastore.TOKENS,
    datastore.SUFFIXES,
    datastore.STARTS,
)


def trained_digests(configurations: Iterable[Configuration]) -> dict[str, str]:
    """A digest of each head and of each datastore, by `head <name>` and `datastore <name>`; of one
    that is not there, an empty one."""
    folders = {}
    for configuration in configurations:
        for _, name in configuration.heads:
            folders[f"head {name}"] = resolve_head(name), HEAD_FILES
        for name in configuration.datastores:
            folders[f"datastore {name}"] = resolve_datastore(name), DATASTORE_FILES
    return {key: _digest(folder, files) for key, (folder, files) in folders.items()}


def _digest(folder: Path, files: Iterable[str]) -> str:
    paths, digest = [folder / file for file in files], hashlib.sha256()
    if not all(path.exists() for path in paths):
        return ""
    add_files(digest, paths)
    return digest.hexdigest()[:16]
