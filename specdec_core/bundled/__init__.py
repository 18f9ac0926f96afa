"""The bundled model pair: one target and two drafts distilled from it, with their prompts."""

from pathlib import Path

from specdec_core.errors import UserError

NAMES = ("target", "draft-medium", "draft-small")
WEIGHTS = Path(__file__).with_name("weights")


def bundled_path(name: str) -> Path:
    """Folder of a bundled model, in Hugging Face format with its tokenizer.

    Raises `UserError` (a `ValueError`) naming the known models for any other name.
    """
    if name not in NAMES:
        raise UserError(f"unknown bundled model {name!r}; known: {', '.join(NAMES)}")
    return WEIGHTS / name
