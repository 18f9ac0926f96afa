"""Check that a running server loses nothing with clients that leave, and that its JSON answers
follow their schemas."""

import os
from typing import Annotated

import typer
from typer import Argument, Option

from jobs.console import console, run
from specdec_core.base.errors import UserError
from tests.conformance.fire import json_answers, under_fire


def main(
    url: Annotated[str, Argument(help="The server, without /v1.")],
    leaving: Annotated[
        int,
        Option(
            min=0, help="Requests of 32 clients, a third of which leave midway; as many warm up."
        ),
    ] = 0,
    answers: Annotated[
        int, Option(min=0, help="JSON answers by random schemas, every second one not speculated.")
    ] = 0,
) -> None:
    """The server's key is in OPENAI_API_KEY, if it needs one."""
    if not leaving and not answers:
        raise UserError("give --leaving or --answers")
    url, key = url.rstrip("/"), os.environ.get("OPENAI_API_KEY")
    outcomes: list[tuple[str, list[str]]] = []
    if leaving:
        found = under_fire(url, key, leaving)
        grown = "" if found.growth is None else f", memory {found.growth:+.1%}"
        counts = f"{found.answered} answered, {found.left} left midway{grown}"
        outcomes.append((f"{2 * leaving} requests, {counts}", found.faults))
    if answers:
        given = json_answers(url, key, answers)
        outcomes.append((f"{given.asked} JSON answers, {given.ended} ended", given.faults))
    for counts, faults in outcomes:
        mark = "[red]failed[/red]" if faults else "[green]passed[/green]"
        console.print(f"{mark}  {counts}")
        for fault in faults:
            console.print(f"  {fault}", markup=False, highlight=False)
    if any(faults for _, faults in outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    run(main)
