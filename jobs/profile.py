"""Measure what forwards of a pair cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from jobs import options
from jobs.console import console, point, run
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec, Placement
from specdec_core.drafting.draft_model.settings import DraftModelSettings

POOR_FIT = 0.9


def main(
    target: options.Target = None,
    draft: options.Drafts = None,
    config: options.SweepFile = None,
    engine: Annotated[
        str | None,
        Option(
            help="Measure this server: vllm (`make bench-peers`) or llama_cpp (`make llama-cpp`);"
            " unset, this engine."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(help="The file to write; unset, where the workspace has the pair's profile there."),
    ] = None,
    widths: Annotated[str | None, Option(help="Tokens a forward, as 1,2,4.")] = None,
    contexts: Annotated[str | None, Option(help="Cached tokens, as 64,256.")] = None,
    batches: Annotated[str | None, Option(help="Rows a forward, as 1,4.")] = None,
    max_length: options.MaxLength = None,
    repeats: Annotated[int | None, Option(min=1, help="Times each forward is measured.")] = None,
    cluster: options.Placed = None,
) -> None:
    """Time forwards of 1, 2, 3, … tokens of every model at several contexts and batch sizes, fit
    the times, and write the fit as JSON. With --engine, whole steps of that server are timed.
    With --cluster the models are on these devices. `specdec sweep` and
    `specdec export` rank by such a profile, also on another machine."""
    if cluster is not None and engine is not None:
        raise UserError("--cluster has the devices of this library's engine, not of a server")
    if out is not None and out.is_dir():
        raise UserError(f"--out {out}: a folder; expected a file")
    placement = None if cluster is None else Placement.load(cluster)
    elsewhere = engine if cluster is None else f"on-{cluster.stem}"
    spec, settings = PairSpec(), {}
    if config is not None:
        from specdec_core.search.plan import read_plan

        plan = read_plan(config)  # its search may need drafts, heads and devices that are not here
        spec, settings = plan.pair, plan.forwards.model_dump(exclude_none=True)
    spec = options.chosen_pair(spec, target, draft, max_length)
    lists = {"widths": widths, "contexts": contexts, "batches": batches}
    settings |= {
        name: options.sizes(text, f"--{name}") for name, text in options.given(**lists).items()
    }
    settings |= options.given(repeats=repeats)
    every_draft = [Configuration(drafter=DraftModelSettings(draft=name)) for name in spec.drafts]

    # Ray, torch and transformers take seconds to import.
    from cluster.placed_engine import loaded_pair
    from dashboards.outputs.console import show
    from dashboards.progress import ConsoleProgress
    from dashboards.reports.profile import sections
    from specdec_core.measure.forward_times import workspace_profile
    from specdec_core.measure.profiling import profile_pair
    from specdec_core.servers.answers import served_pair
    from specdec_core.servers.table import server_of

    server = None
    if engine is not None:
        server = server_of(engine, stage="profile", option="--engine")
    with ConsoleProgress(console) as progress:
        if server is not None:
            pair = served_pair(spec)  # in the types of a sweep of that server
            profile = server.profile(pair, **settings, observer=progress)
        else:
            progress.stage(f"loading {spec.name}")
            with loaded_pair(spec, placement, every_draft) as pair:
                profile = profile_pair(pair, **settings, observer=progress)
    path = profile.save(out or workspace_profile(pair.spec, elsewhere=elsewhere))
    show(console, sections(profile))
    if min(cost.r2 for cost in (profile.target, *profile.drafts.values())) < POOR_FIT:
        console.print(
            "[yellow]The fit is poor; was the machine busy? Measure again on an idle one, or with"
            " more --repeats.[/yellow]",
            soft_wrap=True,
        )
    point("profile", path)


if __name__ == "__main__":
    run(main)
