"""Which trained heads and saved states configurations read, beside models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from specdec_core.base.digests import files_digest
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec
from specdec_core.drafting.heads.storage import CARD, WEIGHTS, resolve_head
from specdec_core.drafting.states import find_state
from specdec_core.models.fingerprints import fingerprints

HEAD_FILES: tuple[str, ...] = (CARD, WEIGHTS)


def head_digest(name: str) -> str:
    """Of a head by name or folder; empty where there is none."""
    return _digest(resolve_head(name), HEAD_FILES)


def trained_digests(configurations: Iterable[Configuration]) -> dict[str, str]:
    """A digest of each head and saved state, by `head <name>` and `state <name>`; empty where a
    file is missing."""
    folders: dict[str, tuple[Path, Sequence[str]]] = {}
    for configuration in configurations:
        for _, name in configuration.heads:
            folders[f"head {name}"] = resolve_head(name), HEAD_FILES
        for name in configuration.states:
            state = find_state(name)
            folders[f"state {name}"] = state.parent, (state.name,)
    return {key: _digest(folder, files) for key, (folder, files) in folders.items()}


def weights_here(pair: PairSpec, configurations: Iterable[Configuration]) -> dict[str, str] | None:
    """A digest of each of a pair's models, and of what configurations read beside them; None where
    a model is not on this machine."""
    try:
        return fingerprints(pair) | trained_digests(configurations)
    except UserError:
        return None


def _digest(folder: Path, files: Iterable[str]) -> str:
    paths = [folder / file for file in files]
    return files_digest(paths) if all(path.exists() for path in paths) else ""
