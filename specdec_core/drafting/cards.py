"""Folders of trained heads, found by name; each has a card that describes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from specdec_core.base.errors import UserError
from specdec_core.base.workspace import present_path, workspace
from specdec_core.config import Value, parse_json

C = TypeVar("C", bound=Value)


def find_folder(name: str, place: str, card: str) -> Path:
    """The folder `name`: a path, or the name of one in the workspace's folder `place`."""
    folder = Path(present_path(name))
    if os.sep in name or (folder / card).exists():
        return folder
    return workspace() / place / name


def read_card(kind: type[C], file: Path, name: str, noun: str, made: str) -> C:
    """The card of the `noun` called `name`. Raises :class:`UserError` where it cannot be read, or
    there is none; the error then has `made`, how to make one."""
    try:
        return parse_json(kind, file.read_bytes(), f"{file}: not a {noun}'s card")
    except OSError:
        known = sorted(path.parent.name for path in file.parents[1].glob(f"*/{file.name}"))
        there = f"there are {', '.join(known)}" if known else made
        raise UserError(f"no {noun} {name} ({file.parent}); {there}") from None
