"""What drafters have learned for later requests, and its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from specdec_core.base.errors import UserError, os_reason
from specdec_core.base.files import write_atomically
from specdec_core.base.workspace import present_path, workspace
from specdec_core.config import parse_json

STATES = "bandits"  # the folder of saved states in the workspace


class DrafterMemory(Protocol):
    """What a drafter has learned for later requests: kept in a file, carried over to another
    engine, and shared with equal drafters of other replicas."""

    def state(self) -> dict[str, Any]:
        """All of it, as JSON values."""

    def restore(self, state: dict[str, Any], source: str = "the state") -> None:
        """Continue from a :meth:`state`. Raises :class:`UserError`, naming `source`, for the state
        of another drafter."""

    def gained(self) -> dict[str, Any]:
        """What the drafter's own rounds have added since the last call."""

    def absorb(self, gain: Mapping[str, Any]) -> None:
        """Add what an equal drafter of another replica has gained."""

    def rows(self) -> list[dict[str, Any]]:
        """A readable table: a row for each drafter that it chooses among."""


def find_state(name: str) -> Path:
    """The file of a saved state: a path, or the name of one in the workspace."""
    path = Path(present_path(name))
    if path.exists() or path.suffix == ".json":
        return path
    return workspace() / STATES / f"{name}.json"


def save_state(state: dict[str, Any], path: Path) -> Path:
    """Write a drafter's state as JSON, whole or not at all."""
    return write_atomically(path, json.dumps(state, ensure_ascii=False, indent=1))


def load_state(path: Path) -> dict[str, Any]:
    """What :func:`save_state` wrote. Raises :class:`UserError` where it cannot be read."""
    try:
        return parse_json(dict[str, Any], path.read_bytes(), f"{path}: not a saved state")
    except OSError as error:
        raise UserError(f"{path}: no saved state can be read: {os_reason(error)}") from None
