"""Measure what forwards of a pair cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from jobs.console import console, point, run
from jobs.options import Drafts, Target, chosen_pair, given, sizes
from specdec_core.base.workspace import workspace
from specdec_core.config import PairSpec

POOR_FIT = 0.9


def main(
    target: Target = None,
    draft: Drafts = None,
    config: Annotated[
        Path | None, Option(help="Sweep file whose pair and profile settings to use.")
    ] = None,
    out: Annotated[
        Path | None, Option(help="Where to write; unset, profile.json in the workspace.")
    ] = None,
    widths: Annotated[str | None, Option(help="Tokens a forward, as 1,2,4.")] = None,
    contexts: Annotated[str | None, Option(help="Cached tokens, as 64,256.")] = None,
    batches: Annotated[str | None, Option(help="Rows a forward, as 1,4.")] = None,
    repeats: Annotated[int | None, Option(min=1, help="Times each forward is measured.")] = None,
) -> None:
    """Time forwards of 1, 2, 3, … tokens of every model at some contexts and batch sizes, fit
    them, and write the fit as JSON."""
    spec, settings = PairSpec(), {}
    if config is not None:
        from specdec_core.search.plan import load_plan

        plan = load_plan(config)
        spec, settings = plan.pair, plan.profile.model_dump(exclude_none=True)
    spec = chosen_pair(spec, target, draft)
    lists = {"widths": widths, "contexts": contexts, "batches": batches}
    settings |= {name: sizes(text, f"--{name}") for name, text in given(**lists).items()}
    settings |= given(repeats=repeats)

    with console.status(f"loading {spec.name}"):
        # torch and transformers take seconds to import
        from dashboards.outputs.console import show
        from dashboards.progress import ConsoleProgress
        from dashboards.reports.profile import sections
        from specdec_core.models.pair import load_pair
        from specdec_core.studies.profiling import profile_pair

        pair = load_pair(spec)
    with ConsoleProgress(console) as progress:
        profile = profile_pair(pair, **settings, observer=progress)
    show(console, sections(profile))
    if min(cost.r2 for cost in (profile.target, *profile.drafts.values())) < POOR_FIT:
        console.print(
            "[yellow]The fit is poor; was the machine busy? Measure again on an idle one, or with"
            " more --repeats.[/yellow]",
            soft_wrap=True,
        )
    path = profile.save(workspace() / "profile.json" if out is None else out)
    point("profile", path)


if __name__ == "__main__":
    run(main)
