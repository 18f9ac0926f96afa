"""Find the fastest configuration of a pair and register it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs.console import console, interruptible, point, print_runs_page, program, run
from jobs.options import (
    Drafts,
    Fresh,
    MaybePrompts,
    MaybeTokens,
    Name,
    Target,
    given,
    named_drafts,
)
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.search.plan import load_plan

if TYPE_CHECKING:
    from specdec_core.search.plan import ResolvedPlan
    from specdec_core.search.results import ReplaySummary, SweepResult

QUICK = Path(__file__).with_name("sweeps") / "quick.yaml"


def main(
    config: Annotated[Path, Option(help="Sweep file.")] = QUICK,
    target: Target = None,
    draft: Drafts = None,
    prompts: MaybePrompts = None,
    max_new_tokens: MaybeTokens = None,
    limit: Annotated[int | None, Option(help="Use the first n prompts.")] = None,
    trials: Annotated[int | None, Option(help="Configurations to try.")] = None,
    traces: Annotated[
        str | None,
        Option(help="Recording to replay, a folder or a name; unset, the one that fits."),
    ] = None,
    no_replay: Annotated[
        bool, Option("--no-replay", help="Decode with every configuration.")
    ] = False,
    hardware: Annotated[
        Path | None,
        Option(help="Forward times of another machine (YAML) to rank for; nothing is timed."),
    ] = None,
    cluster: Annotated[
        Path | None,
        Option(help="Placement (YAML): the devices that draft and target are timed on."),
    ] = None,
    allow_lossy: Annotated[
        list[str] | None,
        Option(help="Lossy method that may become champion; repeatable."),
    ] = None,
    name: Name = None,
    fresh: Fresh = False,
) -> None:
    """Find the fastest lossless configuration of a pair on your prompts (or, with methods that you
    allow by name, the fastest of all).

    Where `specdec record` has recorded the same pair, prompts and settings, configurations are
    replayed from that, thousands in a minute. Interrupted, the same command goes on where it
    stopped.
    """
    if traces is not None and no_replay:
        raise UserError("--traces names a recording to replay, --no-replay forbids it: give one")
    overrides = given(
        max_new_tokens=max_new_tokens,
        trials=trials,
        prompts=given(source=prompts, limit=limit) or None,
        pair=given(target=target, drafts=named_drafts(target, draft)) or None,
        traces=traces,
        replay=False if no_replay else None,
        hardware=None if hardware is None else str(hardware),
        cluster=None if cluster is None else str(cluster),
        allow_lossy=allow_lossy or None,
    )
    plan = load_plan(config, **overrides)
    with interruptible():
        result, version, report = sweep(plan, name, fresh)
    champion = result.champion_trial
    best = f"{result.labels[champion.id]} ({champion.id})"
    if result.hardware is None:
        point("champion", f"{best}, version {version} of {result.pair.name}")
    else:
        point("best", f"{best}, estimated for {result.hardware}: not timed and not registered")
    point("report", report)
    print_runs_page(result.pair.name, "sweeps")
    if result.hardware is None:
        point("serve", f"{program('specdec')} serve")
    if plan.workload is not None:
        choose_among(plan, str(config), traces, hardware, result)


def choose_among(
    plan: ResolvedPlan,
    source: str,
    traces: str | None,
    hardware: Path | None,
    result: SweepResult,
) -> None:
    """For a sweep with a workload: the configuration for each number of its clients, by simulation
    of what was replayed. What was timed, and registered as champion, is for one client."""
    from jobs.schedule import choose_for_load

    console.rule("many requests")
    if plan.workload is None or not plan.workload.clients:
        console.print("a sweep chooses by clients; for a rate or a trace ask `specdec capacity`")
    elif result.replay is None:
        limit = f" --limit {plan.prompts.limit}" if plan.prompts.limit else ""
        record = (
            f"{program('specdec')} record --prompts {plan.prompts.source}{limit}"
            f" --max-new-tokens {plan.max_new_tokens}"
        )
        console.print(f"nothing was replayed, so nothing can be simulated; first: {record}")
    else:
        recording = traces or result.replay.recording
        choose_for_load(plan, source, recording, hardware=hardware, name=result.name)


def sweep(
    plan: ResolvedPlan, name: str | None, fresh: bool
) -> tuple[SweepResult, int | None, Path]:
    """Run the sweep and show, write and log its report: the result, the registered version and the
    report's page."""
    # Ray, torch and MLflow take seconds to import.
    from cluster.sweep.run import run_sweep
    from dashboards.outputs.console import show
    from dashboards.outputs.files import write_page
    from dashboards.progress import SweepProgress
    from dashboards.reports.standings import standings, timed_sentences
    from dashboards.reports.sweep import of_folder
    from dashboards.tracking.sweep_run import SweepRun

    progress = SweepProgress(console)
    with SweepRun(progress) as tracking:
        with progress:
            result, folder = run_sweep(plan, workspace(), name, fresh, [tracking, progress])
        page = write_page(of_folder(result, folder.path), folder.path)
        show(console, [standings(result), timed_sentences(result)])
        if result.replay is not None:
            point("replayed", replay_line(result.replay))
        with console.status("writing to MLflow"):
            version = tracking.finish(result, folder.path, page)
        folder.finish()
    return result, version, page


def replay_line(replay: ReplaySummary) -> str:
    """How many configurations were replayed, how fast, and how many forwards that saved."""
    line = f"{replay.configurations:,} configurations"
    if replay.per_second:
        line += f", {replay.per_second:,.0f} a second"
    line += (
        f"; saved {replay.n_draft:,} draft and {replay.n_target:,} target forwards "
        f"({replay.recording})"
    )
    if replay.checked:
        line += f"; live counts equal for {replay.equal} of {replay.checked} timed"
        if replay.deviation:
            line += f", the others' forwards within {replay.deviation:.1%}"
    return line


if __name__ == "__main__":
    run(main)
