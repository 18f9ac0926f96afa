"""The main job on the bundled pair and real prompts, and where to go from there."""

from __future__ import annotations

from typing import Annotated

import typer

from jobs import sweep
from jobs.console import console, program, run


def main(
    fresh: Annotated[bool, typer.Option(help="do not resume an interrupted demo")] = False,
) -> None:
    """Profile the bundled pair, count configurations in parallel, time the best ones alone,
    register the champion and write the report."""
    sweep.main(config=sweep.QUICK, fresh=fresh)
    console.print(
        f"your pair {program('specdec')} sweep --target <folder or hub id>"
        " --draft <folder or hub id> --prompts prompts.jsonl",
        soft_wrap=True,
    )


if __name__ == "__main__":
    run(main)
