"""The bundled model pair: one target and two drafts distilled from it, with their prompts."""

import os
from pathlib import Path

from specdec_core.base.errors import UserError

NAMES = ("target", "draft-medium", "draft-small")
WEIGHTS = Path(__file__).parents[1] / "bundled" / "weights"


def bundled_path(name: str) -> Path:
    """Folder of a bundled model, in Hugging Face format with its tokenizer.

    Raises `UserError` (a `ValueError`) naming the known models for any other name.
    """
    if name not in NAMES:
        raise UserError(f"unknown bundled model {name!r}; known: {', '.join(NAMES)}")
    return WEIGHTS / name


def resolve_path(name: str) -> str:
    """The folder of a bundled model; any other name as it is, `~` expanded."""
    if not name.startswith("bundled:"):
        return os.path.expanduser(name)
    return str(bundled_path(name.removeprefix("bundled:")))
