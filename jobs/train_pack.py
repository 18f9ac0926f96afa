"""Store a trained EAGLE head in eight bits, to ship it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from jobs.console import point, run


def main(
    head: Annotated[Path, Argument(help="Folder of what `specdec train eagle` trained.")],
    out: Annotated[Path, Option(help="Folder to write; what is in it is replaced.")],
) -> None:
    """Write a trained head with its matrices in eight bits, half the size. Only specdec reads that
    form; other servers read the trained one."""
    from specdec_core.training.eagle.packed import pack_head  # torch takes seconds to import

    pack_head(head, out)
    point("packed", out)


if __name__ == "__main__":
    run(main)
