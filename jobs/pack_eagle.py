"""Store a trained EAGLE head in eight bits, to ship it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from jobs.console import point, run
from jobs.packing import About, PackedInto, PackedName, about_text


def main(
    head: Annotated[Path, Argument(help="Folder of the head, as `specdec train-eagle` leaves it.")],
    out: PackedInto,
    name: PackedName = None,
    about: About = None,
) -> None:
    """Write a trained EAGLE head with its matrices in eight bits, half the size, and a README with
    its figures and recipe. Only specdec reads that form; vLLM reads the trained one."""
    text = about_text(about)
    from specdec_core.training.eagle.packed import pack_head  # torch takes seconds to import

    pack_head(head, out, name or str(out), text)
    point("head", out)


if __name__ == "__main__":
    run(main)
