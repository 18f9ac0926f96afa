"""Measure and write the papers' comparison tables for a pair."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from jobs.console import console, print_runs_page, run
from jobs.sweep import given, parse_drafts
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace

PAPERS = Path(__file__).with_name("sweeps") / "papers.yaml"
QUICK = {"limit": 3, "max_new_tokens": 32, "repeats": 1}


def main(
    config: Annotated[Path, Option(help="file with the tables")] = PAPERS,
    target: Annotated[str | None, Option(help="target: hub id, folder, bundled:…")] = None,
    draft: Annotated[
        list[str] | None, Option(help="draft model, [name=]model; may be repeated")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        Option(help="where a prompt set is: NAME=JSONL file or hub id; may be repeated"),
    ] = None,
    table: Annotated[
        list[str] | None, Option(help="only this table of the file; may be repeated")
    ] = None,
    limit: Annotated[int | None, Option(min=1, help="prompts of each set")] = None,
    max_new_tokens: Annotated[int | None, Option(help="tokens for each prompt")] = None,
    repeats: Annotated[int | None, Option(help="times each prompt is timed")] = None,
    quick: Annotated[
        bool, Option("--quick", help="a first look: 3 prompts a set, 32 new tokens, once")
    ] = False,
    name: Annotated[str | None, Option(help="name of the result's folder")] = None,
    fresh: Annotated[bool, Option("--fresh", help="do not resume")] = False,
) -> None:
    """Write the papers' comparison tables, measured live for your pair and prompts.

    Every method is decoded in turn with the others on the same prompts. Run it on an otherwise
    idle machine. Interrupted, the same command goes on where it stopped.
    """
    from specdec_core.studies.papers.plan import load_paper_plan

    asked = given(limit=limit, max_new_tokens=max_new_tokens, repeats=repeats)
    drafts = parse_drafts(draft) if draft or target is not None else None
    plan = load_paper_plan(
        config,
        only=table or (),
        sources=parse_sources(prompts),
        pair=given(target=target, drafts=drafts),
        **{**(QUICK if quick else {}), **asked},
    )

    # Ray, torch and MLflow take seconds to import.
    from cluster.papers import run_papers
    from dashboards.paper_tables import console_table, sheets
    from dashboards.papers import findings, log_papers, write_papers
    from dashboards.progress import SweepProgress

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with SweepProgress(console) as progress:
            result, folder = run_papers(plan, workspace(), name, fresh, progress)
            progress.stage("writing the tables")
            files = write_papers(result, folder.path)
            log_papers(result, folder.path, files)
            folder.finish()
    except KeyboardInterrupt:
        console.print("interrupted; the same command resumes")
        sys.exit(130)
    for sheet in sheets(result):
        console.print(console_table(sheet))
    for line in findings(result):
        console.print(line, soft_wrap=True, markup=False)
    console.print(f"tables    {folder.path / 'papers.md'}", soft_wrap=True)
    console.print(f"page      {folder.path / 'papers.html'}", soft_wrap=True)
    print_runs_page(result.pair.name)


def parse_sources(options: list[str] | None) -> dict[str, str]:
    """`NAME=source` options as sources by prompt set."""
    found = {}
    for option in options or ():
        name, separator, source = option.partition("=")
        if not separator or not name or not source:
            raise UserError(f"--prompts {option}: expected NAME=source")
        found[name] = source
    return found


if __name__ == "__main__":
    run(main)
