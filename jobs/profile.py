"""Measure what forwards of a pair cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from jobs import options
from jobs.console import console, point, run
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec, Placement
from specdec_core.drafting.draft_model.settings import DraftModelSettings

if TYPE_CHECKING:
    from specdec_core.base.observer import Observer
    from specdec_core.cost import Profile
    from specdec_core.models.pair import Pair

POOR_FIT = 0.9


def main(
    target: options.Target = None,
    draft: options.Drafts = None,
    config: options.SweepFile = None,
    engine: Annotated[
        Literal["specdec", "vllm", "llama_cpp"],
        Option(
            help="Measure this engine, vLLM (`make bench-peers`) or llama.cpp (`make llama-cpp`)."
        ),
    ] = "specdec",
    out: Annotated[
        Path | None,
        Option(
            help="Where to write; unset, where the workspace has the pair's profile in this engine."
        ),
    ] = None,
    widths: Annotated[str | None, Option(help="Tokens a forward, as 1,2,4.")] = None,
    contexts: Annotated[str | None, Option(help="Cached tokens, as 64,256.")] = None,
    batches: Annotated[str | None, Option(help="Rows a forward, as 1,4.")] = None,
    max_length: options.MaxLength = None,
    repeats: Annotated[int | None, Option(min=1, help="Times each forward is measured.")] = None,
    cluster: options.Placed = None,
) -> None:
    """Time forwards of 1, 2, 3, … tokens of every model at several contexts and batch sizes, fit
    the times, and write the fit as JSON. With another engine, whole steps are timed, which verify
    the tokens of all rows. With --cluster the models are on these devices. `specdec export` ranks
    by such a profile."""
    elsewhere: str | None = None if engine == "specdec" else engine
    placement = None if cluster is None else Placement.load(cluster)
    if cluster is not None:
        if elsewhere is not None:
            raise UserError("--cluster has the devices of this library's engine, not of a server")
        elsewhere = f"on-{cluster.stem}"
    spec, settings = PairSpec(), {}
    if config is not None:
        from specdec_core.search.plan import load_plan

        plan = load_plan(config)
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

    with ConsoleProgress(console) as progress:
        progress.stage(f"loading {spec.name}")
        with loaded_pair(spec, placement, every_draft) as pair:
            profile = _measured(engine, pair, settings, progress)
    path = profile.save(out or workspace_profile(pair.spec, elsewhere=elsewhere))
    show(console, sections(profile))
    if min(cost.r2 for cost in (profile.target, *profile.drafts.values())) < POOR_FIT:
        console.print(
            "[yellow]The fit is poor; was the machine busy? Measure again on an idle one, or with"
            " more --repeats.[/yellow]",
            soft_wrap=True,
        )
    point("profile", path)


def _measured(engine: str, pair: Pair, settings: dict[str, Any], observer: Observer) -> Profile:
    if engine != "specdec":
        from specdec_core.servers.table import server_of

        server = server_of(engine, stage="profile", option="--engine")
        return server.profile(pair, **settings, observer=observer)
    from specdec_core.measure.profiling import profile_pair

    return profile_pair(pair, **settings, observer=observer)


if __name__ == "__main__":
    run(main)
