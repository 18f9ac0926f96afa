"""Measure what forwards of a pair cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer import Option

from jobs.console import console, run
from jobs.sweep import parse_drafts
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import PairSpec

if TYPE_CHECKING:
    from specdec_core.cost import ForwardCost, Profile

POOR_FIT = 0.9


def main(
    target: Annotated[
        str | None, Option(help="Target model: hub id, folder or bundled:<name>.")
    ] = None,
    draft: Annotated[
        list[str] | None,
        Option(help="Draft model as [name=]<hub id, folder or bundled:…>; repeatable."),
    ] = None,
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
    for name, text in (("widths", widths), ("contexts", contexts), ("batches", batches)):
        if text is not None:
            settings[name] = sizes(text, f"--{name}")
    if repeats is not None:
        settings["repeats"] = repeats

    with console.status(f"loading {spec.name}"):
        # torch and transformers take seconds to import
        from specdec_core.models.pair import load_pair
        from specdec_core.studies.profiling import profile_pair

        pair = load_pair(spec)
    columns = (TextColumn("measuring forwards"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")
        profile = profile_pair(
            pair,
            **settings,
            on_step=lambda done, total: progress.update(task, completed=done, total=total),
        )
    show(profile)
    path = profile.save(workspace() / "profile.json" if out is None else out)
    console.print(f"profile: {path}", markup=False, soft_wrap=True)


def chosen_pair(base: PairSpec, target: str | None, drafts: list[str] | None) -> PairSpec:
    """`base` with what the options name. Another target has none of `base`'s drafts."""
    changes: dict[str, object] = {"target": target} if target is not None else {}
    if drafts or target is not None:
        changes["drafts"] = parse_drafts(drafts)
    return base.model_copy(update=changes)


def sizes(text: str, option: str) -> tuple[int, ...]:
    """Positive numbers separated by commas."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise UserError(f"{option} {text}: expected positive numbers as 1,2,4")
    return found


def show(profile: Profile) -> None:
    """Forward times against n, and what was fitted."""
    costs = {"target": profile.target, **profile.drafts}
    context = min(
        {m.context for m in profile.target.measurements},
        key=lambda c: abs(c - profile.target.typical_context),
    )
    batch = min(m.batch for m in profile.target.measurements)
    times = Table(
        title=f"ms a forward of n tokens, context {context}, batch {batch}, {profile.device}",
        title_justify="left",
        min_width=70,
    )
    times.add_column("n", justify="right")
    for name in costs:
        times.add_column(name, justify="right")
    measured = {name: _by_width(cost, context, batch) for name, cost in costs.items()}
    for width in measured["target"]:
        times.add_row(str(width), *(f"{1e3 * measured[name][width]:.2f}" for name in costs))
    console.print(times)

    fits = Table(title="fit", title_justify="left", min_width=70)
    fits.add_column("model")
    fits.add_column("type")
    for heading in ("n = 1, ms", "÷ target", "+1 token, µs", "R²", "worst"):
        fits.add_column(heading, justify="right")
    one = profile.target.seconds(1, context, batch)
    for name, cost in costs.items():
        more = cost.seconds(3, context, batch) - cost.seconds(2, context, batch)
        fits.add_row(
            name,
            profile.target_dtype if cost is profile.target else profile.draft_dtype,
            f"{1e3 * cost.seconds(1, context, batch):.2f}",
            f"{cost.seconds(1, context, batch) / one:.3f}",
            f"{1e6 * more:.0f}",
            f"{cost.r2:.3f}",
            f"{cost.worst_error:.0%}",
        )
    console.print(fits)
    overheads = [f"a round {1e3 * profile.round_overhead:.2f} ms"]
    overheads += [
        f"a token of {name} {1e3 * seconds:.2f} ms"
        for name, seconds in profile.draft_overhead.items()
    ]
    console.print(f"the engine adds: {', '.join(overheads)}", markup=False, soft_wrap=True)
    if min(cost.r2 for cost in costs.values()) < POOR_FIT:
        console.print(
            "[yellow]The fit is poor; was the machine busy? Measure again on an idle one, or with"
            " more --repeats.[/yellow]",
            soft_wrap=True,
        )


def _by_width(cost: ForwardCost, context: int, batch: int) -> dict[int, float]:
    return {
        m.width: m.seconds for m in cost.measurements if (m.context, m.batch) == (context, batch)
    }


if __name__ == "__main__":
    run(main)
