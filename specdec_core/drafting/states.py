"""What drafters have learned, on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.base.workspace import present_path, workspace

STATES = "bandits"  # their folder in the workspace


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
        state = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: no saved state can be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not a saved state: {error}") from None
    if not isinstance(state, dict):
        raise UserError(f"{path}: not a saved state")
    return state
