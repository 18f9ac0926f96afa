"""Store a trained EAGLE head or draft model in eight bits, to ship it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from jobs.console import point, run
from specdec_core.base.errors import UserError
from specdec_core.config import load_yaml


def main(
    trained: Annotated[
        Path,
        Argument(help="Folder of what `specdec train eagle` or `specdec train draft` trained."),
    ],
    out: Annotated[Path, Option(help="Folder to write; what is in it is replaced.")],
    name: Annotated[
        str | None, Option(help="What commands call it, for its README; unset, the folder.")
    ] = None,
    about: Annotated[
        Path | None,
        Option(help="Markdown for its README: the prompts' origin, the licence, limits."),
    ] = None,
) -> None:
    """Write a trained head or draft model with its matrices in eight bits, half the size, and a
    README with its figures and recipe. Only specdec reads that form; other servers read the
    trained one."""
    text = _text(about)
    # torch takes seconds to import
    from specdec_core.training.eagle.packed import pack_head
    from specdec_core.training.recorded.finished import CARD
    from specdec_core.training.reduced_draft.packed import pack_draft

    pack = pack_head if "head" in load_yaml(trained / CARD) else pack_draft
    pack(trained, out, name or str(out), text)
    point("packed", out)


def _text(about: Path | None) -> str:
    """The text in a file, empty for none. Raises :class:`UserError` where it cannot be read."""
    try:
        return "" if about is None else about.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"{about}: cannot be read, {reason.lower()}") from None


if __name__ == "__main__":
    run(main)
