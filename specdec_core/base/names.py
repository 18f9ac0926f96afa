"""Names for files, folders and metrics."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from specdec_core.base.errors import UserError

_SPELT = {"λ": "lambda", "γ": "gamma", "α": "alpha", "×": "x", "+": "plus", "=": "_"}


def plain_name(text: str) -> str:
    """`text` in letters, digits, _ and - alone."""
    spelt = "".join(_SPELT.get(letter, letter) for letter in text)
    return re.sub(r"[^\w-]", "_", spelt, flags=re.ASCII)


def digest_name(text: str) -> str:
    """A name of 16 digits for a text of any length."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def names_folder(name: str) -> bool:
    """Whether a folder in another one can have this name."""
    return name not in ("", "..") and Path(name).name == name


def check_name(name: str | None) -> None:
    """Raises :class:`UserError` for a `--name` that cannot be a folder's."""
    if name is not None and not names_folder(name):
        raise UserError(f"--name {name}: expected a folder's name, not a path")
