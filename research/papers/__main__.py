"""Measure and write the papers' comparison tables for a pair."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs.console import console, interruptible, point, print_runs_page, run, typed
from jobs.options import (
    Compile,
    Drafts,
    Fresh,
    MaxLength,
    MaybeChatTemplate,
    MaybeLimit,
    MaybeTokens,
    Name,
    Placed,
    Target,
    given,
    pair_changes,
)
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import Placement

if TYPE_CHECKING:
    from research.papers.methods import Paper
    from research.papers.studies import Study

PAPERS = Path(__file__).parents[1] / "sweeps" / "papers.yaml"
METHODS = PAPERS.with_name("papers-methods.yaml")
LONG_FORM = Path(__file__).parents[1] / "long_form" / "bundled.yaml"
QUICK = {"limit": 3, "max_new_tokens": 32, "repeats": 1}


def main(
    config: Annotated[Path, Option(help="File with the tables.")] = PAPERS,
    target: Target = None,
    draft: Drafts = None,
    prompts: Annotated[
        list[str] | None,
        Option(help="Where a prompt set is: NAME=<JSONL file or hub id>; repeatable."),
    ] = None,
    table: Annotated[
        list[str] | None, Option(help="Only this table of the file; repeatable.")
    ] = None,
    section: Annotated[
        list[str] | None, Option(help="Only this section from recordings, on the page; repeatable.")
    ] = None,
    long_form: Annotated[
        Path, Option(help="YAML of the page's long texts: a benchmark's rows, and contexts.")
    ] = LONG_FORM,
    chat_template: MaybeChatTemplate = None,
    limit: MaybeLimit = None,
    recorded: Annotated[
        int | None,
        Option(min=1, help="Prompts of each set to record for the page; unset, those of --limit."),
    ] = None,
    max_new_tokens: MaybeTokens = None,
    max_length: MaxLength = None,
    compile: Compile = None,
    repeats: Annotated[int | None, Option(help="Times each prompt is timed.")] = None,
    quick: Annotated[
        bool, Option("--quick", help="A first look: 3 prompts a set, 32 new tokens, once.")
    ] = False,
    cluster: Placed = None,
    name: Name = None,
    fresh: Fresh = False,
    write_page: Annotated[
        Path | None,
        Option("--page", help="Also write the page of methods, code, tests and numbers here."),
    ] = None,
) -> None:
    """Write the papers' comparison tables, measured live for your pair and prompts.

    All methods are decoded interleaved on the same prompts. Run it on an otherwise idle
    machine. Interrupted, the same command resumes where it stopped. With --page, what the
    page's sections need is recorded too, and what was measured or computed for the same inputs is
    taken, unless --fresh. With --cluster the models are on these devices, and there is no page.
    """
    from research.papers.methods import load_methods
    from research.papers.plan import load_paper_plan

    begun = perf_counter()
    devices = cluster and Placement.load(cluster).model_dump()
    options = given(limit=limit, max_new_tokens=max_new_tokens, repeats=repeats, cluster=devices)
    plan = load_paper_plan(
        config,
        only=table or (),
        sources=parse_sources(prompts),
        recorded=recorded,
        chat_template=chat_template,
        pair=pair_changes(target, draft, max_length, compile),
        **{**(QUICK if quick else {}), **options},
    )
    for option, used in (("--section", section), ("--recorded", recorded)):
        if used and write_page is None:
            raise UserError(f"{option} goes with --page")
    if write_page is not None and plan.cluster is not None:
        raise UserError("--page: its sections are computed with whole models: not with --cluster")
    listed: tuple[Paper, ...] = ()
    studies: list[Study] = []
    if write_page is not None:
        studies = studies_of(section)
        known = [each.key for each in studies_of(None)]
        listed = load_methods(METHODS, load_paper_plan(PAPERS), known)

    # Ray, torch and MLflow take seconds to import.
    from dashboards.outputs.console import show
    from dashboards.outputs.files import write
    from dashboards.outputs.mlflow_runs import log
    from dashboards.progress import ConsoleProgress
    from research.long_form.study import LongFormPlan
    from research.papers.page import papers_page
    from research.papers.run import run_papers, study_inputs
    from research.papers.studies import study_tables
    from research.papers.tables import report
    from specdec_core.base.files import write_atomically

    same = {"pair": plan.pair.model_dump(mode="json")}
    long_texts = LongFormPlan.load(long_form, **same) if write_page else None

    with interruptible(), ConsoleProgress(console) as progress:
        again = write_page is None  # the page is made of what is there
        result, folder = run_papers(plan, workspace(), name, fresh, progress, again)
        progress.stage("writing the tables")
        shown = report(result)
        files = write(shown, folder.path, "papers", apart=True)
        kept = [folder.path / "papers.json", folder.path / "plan.yaml"]
        logged = folder.path / "logged"  # with the run's id, so that a result has one run
        if not (folder.finished or logged.exists()):
            write_atomically(logged, log(shown, [*files, *kept], resume=folder.path))
        if write_page is not None:
            wanted = {name for study in studies for name in study.needs}
            home = workspace()
            inputs = study_inputs(plan, result, folder, home, wanted, progress, long_texts)
            studied = study_tables(studies, inputs, folder.sections, fresh, progress)
            made_by = f"`{typed('lab papers')}` in {(perf_counter() - begun) / 60:.0f} minutes"
            text, beside = papers_page(result, listed, made_by, studied, stem=write_page.stem)
            for file, content in beside.items():
                write_atomically(write_page.parent / file, content)
            write_atomically(write_page, text)
        folder.finish()
    show(console, shown.sections)
    if write_page is not None:
        point("methods", write_page)
    point("tables", folder.path / "papers.md")
    point("page", folder.path / "papers.html")
    print_runs_page(result.pair.name)


def studies_of(keys: list[str] | None) -> list[Study]:
    """The studies of the sections with these keys; of all, if unset."""
    from research.papers.sections import SECTIONS

    studies = {section.key: section for section in SECTIONS}
    for key in keys or ():
        if key not in studies:
            raise UserError(f"--section {key}: no such section ({', '.join(studies)})")
    return [study for key, study in studies.items() if keys is None or key in keys]


def parse_sources(options: list[str] | None) -> dict[str, str]:
    """`NAME=source` options as sources by prompt set."""
    sources = {}
    for option in options or ():
        name, separator, source = option.partition("=")
        if not separator or not name or not source:
            raise UserError(f"--prompts {option}: expected NAME=source")
        sources[name] = source
    return sources


if __name__ == "__main__":
    run(main)
