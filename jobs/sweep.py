"""Find the fastest configuration of a pair and register it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs import options
from jobs.console import (
    console,
    interruptible,
    point,
    print_runs_page,
    program,
    run,
    serve_command,
    typed,
)
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import PairConfiguration
from specdec_core.search.plan import load_plan

if TYPE_CHECKING:
    from specdec_core.search.plan import ResolvedPlan
    from specdec_core.search.results import SweepResult

SCHEDULE = "schedule.yaml"  # in a sweep's folder: the configuration for all loads of a workload
QUICK = Path(__file__).with_name("sweeps") / "quick.yaml"
SERVERS = QUICK.with_name("servers.yaml")


def main(
    config: Annotated[
        Path | None,
        Option(help="Sweep file; unset, jobs/sweeps/quick.yaml, or servers.yaml with --engine."),
    ] = None,
    target: options.Target = None,
    draft: options.Drafts = None,
    prompts: options.MaybePrompts = None,
    chat_template: options.MaybeChatTemplate = None,
    max_new_tokens: options.MaybeTokens = None,
    max_length: options.MaxLength = None,
    compile: options.Compile = None,
    limit: options.MaybeLimit = None,
    trials: Annotated[int | None, Option(help="Configurations to try.")] = None,
    traces: options.Traces = None,
    no_replay: Annotated[
        bool, Option("--no-replay", help="Decode with every configuration.")
    ] = False,
    profile: Annotated[
        Path | None,
        Option(
            help="Forward times of another machine to rank for, where nothing is timed: a file of"
            " `specdec profile`, or a few figures (YAML). With --engine: the costs of the server's"
            " steps; unset, the workspace's, measured if missing."
        ),
    ] = None,
    cluster: options.Placed = None,
    allow_lossy: Annotated[
        list[str] | None,
        Option(help="Lossy method that may become champion; repeatable."),
    ] = None,
    clients: Annotated[
        str | None, Option(help="Clients at once, as 1,4,8: the plan's workload.")
    ] = None,
    engine: Annotated[
        str | None,
        Option(help="Sweep this server instead of this engine: its settings are raced in it."),
    ] = None,
    name: options.Name = None,
    fresh: options.Fresh = False,
) -> None:
    """Find the fastest lossless configuration of a pair on your prompts (or, with methods that you
    allow by name, the fastest of all).

    Where `specdec record` has recorded the same pair, prompts and settings, configurations are
    replayed from that, thousands in a minute. Interrupted, the same command resumes where it
    stopped. With a workload in the sweep file, a configuration is chosen for each of its loads, and
    the champion is all of them together.

    With --engine the settings of another server are ranked for each load, by its answers and the
    costs of its steps. The best are started in it and timed beside its own defaults.
    """
    if traces is not None and no_replay:
        raise UserError("--traces names a recording to replay, --no-replay forbids it: give one")
    overrides = options.given(
        max_new_tokens=max_new_tokens,
        trials=trials,
        prompts=options.given(source=prompts, limit=limit, chat_template=chat_template) or None,
        pair=options.pair_changes(target, draft, max_length, compile) or None,
        traces=traces,
        replay=False if no_replay else None,
        profile=profile,
        cluster=cluster,
        allow_lossy=allow_lossy or None,
        workload=None if clients is None else {"clients": options.sizes(clients, "--clients")},
    )
    config = config or (QUICK if engine is None else SERVERS)
    if engine is not None:
        given_here = {"--no-replay": no_replay, "--allow-lossy": allow_lossy}
        if wrong := [option for option, value in given_here.items() if value]:
            raise UserError(f"{wrong[0]}: not with --engine, which ranks by replay and races there")
        sweep_server(engine, config, overrides, name, fresh)
        return
    plan = load_plan(config, **overrides)
    with interruptible():
        result, version, report = sweep(plan, name, fresh)
    served = result.served
    best = f"{result.labels[served.id]} ({served.id})"
    if result.hardware is None:
        point("champion", f"{best}, version {version} of {result.pair.name}")
    else:
        point("best", f"{best}, estimated for {result.hardware}: not timed and not registered")
    if result.under_load is not None:
        point("schedule", report.with_name(SCHEDULE))
    elif plan.workload is not None:
        point(
            "workload",
            "nothing was replayed, so nothing is chosen for it; first record the same pair,"
            " prompts and lengths: `specdec record --config` takes them from the sweep file",
        )
    point("report", report)
    print_runs_page(result.pair.name, "sweeps")
    if result.hardware is None:
        point("serve", serve_command(plan.workload))
        point("certify", f"{program('specdec')} certify")


def sweep_server(
    engine: str,
    config: Path,
    overrides: dict[str, Any],
    name: str | None,
    fresh: bool,
) -> None:
    """Sweep a server, and show, write, log and register what came out."""
    from specdec_core.servers.table import server_of

    server_of(engine, stage="serve", option="--engine")
    server = server_of(engine, stage="profile", option="--engine")
    plan = load_plan(config, **overrides)
    from cluster.sweep.server import run_server_sweep
    from cluster.sweep.server_stages import CHAMPION, LOGS
    from dashboards.outputs.console import show
    from dashboards.outputs.files import write
    from dashboards.outputs.mlflow_runs import delivering, log
    from dashboards.progress import RaceProgress
    from dashboards.reports.server_sweep import report
    from dashboards.store import connect
    from dashboards.tracking.registry import register_in_server
    from dashboards.tracking.sweep_run import log_once

    with interruptible(), RaceProgress(console) as progress:
        result, folder, prompts = run_server_sweep(
            plan, server, workspace(), typed("sweep"), name, fresh, progress
        )
    shown = report(result)
    kept = f"all results are in {folder.path}, and the same command logs them"
    with folder.lock(), console.status("writing to MLflow"):
        files = [*write(shown, folder.path), folder.path / result.FILE, folder.path / LOGS]
        with delivering(kept):
            asked = (result.race.prompts, prompts)
            log_it = partial(log, shown, files, prompts=asked, resume=folder.path)
            run_id = log_once(connect(), result, folder.path, log_it)
            version = register_in_server(result, run_id, folder.path / CHAMPION)
        folder.finish()
    show(console, shown.sections)
    model = f"{result.race.pair.name}-{result.server}"
    registered = "not registered" if version is None else f"version {version} of {model}"
    point("champion", f"{result.champion}, {registered}")
    point("report", folder.path / "report.html")
    point("written", folder.path / CHAMPION)
    print_runs_page(result.race.pair.name)
    point("start", result.command)


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
    from dashboards.reports.load_choice import loads, served
    from dashboards.reports.standings import standings, timed_sentences
    from dashboards.reports.sweep import replayed, report
    from dashboards.tracking.sweep_run import SweepRun

    tracking = SweepRun()
    with SweepProgress(console, tracking) as progress:
        result, folder = run_sweep(plan, workspace(), name, fresh, progress)
    page = write_page(report(result), folder.path)
    sections = [standings(result), timed_sentences(result)]
    if result.under_load is not None:
        chosen = PairConfiguration(pair=result.pair, configuration=result.under_load.chosen)
        chosen.save(folder.path / SCHEDULE)
        sections += [loads(result.under_load), served(result.under_load)]
    show(console, sections)
    if result.replay is not None:
        point("replayed", replayed(result.replay))
    with folder.lock(), console.status("writing to MLflow"):
        version = tracking.finish(result, folder.path, page)
        folder.finish()
    return result, version, page


if __name__ == "__main__":
    run(main)
