"""Store a trained draft in eight bits, to ship it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from jobs.console import point, run
from jobs.packing import About, PackedInto, PackedName, about_text


def main(
    draft: Annotated[
        Path, Argument(help="Folder of the draft, as `specdec train-draft` leaves it.")
    ],
    out: PackedInto,
    name: PackedName = None,
    about: About = None,
) -> None:
    """Write a trained draft with its matrices in eight bits, and a README with its figures and
    recipe."""
    text = about_text(about)
    from specdec_core.training.reduced_draft.packed import pack_draft  # torch takes seconds

    pack_draft(draft, out, name or str(out), text)
    point("draft", out)


if __name__ == "__main__":
    run(main)
