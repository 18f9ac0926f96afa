"""Store a trained EAGLE head in eight bits, to ship it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from jobs.console import point, run
from specdec_core.base.errors import UserError


def main(
    head: Annotated[Path, Argument(help="Folder of the head, as `specdec train-eagle` leaves it.")],
    out: Annotated[Path, Option(help="Folder to write; what is in it is replaced.")],
    name: Annotated[
        str | None, Option(help="What commands call it, for its README; unset, the folder.")
    ] = None,
    about: Annotated[
        Path | None,
        Option(help="Markdown for its README: the prompts' origin, the licence, limits."),
    ] = None,
) -> None:
    """Write a trained EAGLE head with its matrices in eight bits, half the size, and a README with
    its figures and recipe. Only specdec reads that form; vLLM reads the trained one."""
    try:
        text = "" if about is None else about.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"{about}: cannot be read, {reason.lower()}") from None
    from specdec_core.training.eagle.packed import pack_head  # torch takes seconds to import

    pack_head(head, out, name or str(out), text)
    point("head", out)


if __name__ == "__main__":
    run(main)
