"""What the commands share that store a trained model to ship it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from specdec_core.base.errors import UserError

PackedInto = Annotated[Path, Option(help="Folder to write; what is in it is replaced.")]
PackedName = Annotated[
    str | None, Option(help="What commands call it, for its README; unset, the folder.")
]
About = Annotated[
    Path | None,
    Option(help="Markdown for its README: the prompts' origin, the licence, limits."),
]


def about_text(about: Path | None) -> str:
    """The text in a file, empty for none. Raises :class:`UserError` where it cannot be read."""
    try:
        return "" if about is None else about.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"{about}: cannot be read, {reason.lower()}") from None
