"""The bundled models: a target with two drafts distilled from it, and an EAGLE head and a draft for
a target that `python -m jobs.fetch` installs."""

from pathlib import Path

from specdec_core.base.errors import UserError
from specdec_core.base.workspace import present_path

PAIR = ("target", "draft-medium", "draft-small")
FOR_FETCHED = ("smollm2-eagle", "smollm2-draft")
WEIGHTS = Path(__file__).parents[1] / "bundled" / "weights"


def bundled_path(name: str) -> Path:
    """Folder of a bundled model, in Hugging Face format: of the pair with its tokenizer; a head or
    a draft of a fetched target has that one's.

    Raises `UserError` (a `ValueError`) naming the known models for any other name.
    """
    known = (*PAIR, *FOR_FETCHED)
    if name not in known:
        raise UserError(f"unknown bundled model {name!r}; known: {', '.join(known)}")
    return WEIGHTS / name


def resolve_path(name: str) -> str:
    """The folder of a bundled model; any other name as :func:`present_path` has it."""
    if not name.startswith("bundled:"):
        return present_path(name)
    return str(bundled_path(name.removeprefix("bundled:")))
