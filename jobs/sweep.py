"""Find the fastest configuration of a pair and register it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from jobs.console import console, print_runs_page, program, run
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.search.plan import load_plan

if TYPE_CHECKING:
    from specdec_core.search.results import ReplaySummary

QUICK = Path(__file__).with_name("sweeps") / "quick.yaml"


def main(
    config: Annotated[Path, typer.Option(help="sweep file")] = QUICK,
    target: Annotated[str | None, typer.Option(help="target: hub id, folder, bundled:…")] = None,
    draft: Annotated[
        list[str] | None, typer.Option(help="draft model, [name=]model; may be repeated")
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="JSONL file, hub id, bundled:…")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="tokens for each prompt")] = None,
    limit: Annotated[int | None, typer.Option(help="use the first n prompts")] = None,
    trials: Annotated[int | None, typer.Option(help="configurations to try")] = None,
    traces: Annotated[
        str | None,
        typer.Option(help="recording to replay, a folder or a name; unset, the one that fits"),
    ] = None,
    no_replay: Annotated[
        bool, typer.Option("--no-replay", help="decode with every configuration")
    ] = False,
    hardware: Annotated[
        Path | None,
        typer.Option(help="forward times of another machine (YAML) to rank for; nothing is timed"),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="placement (YAML): the devices that draft and target are timed on"),
    ] = None,
    allow_lossy: Annotated[
        list[str] | None,
        typer.Option(help="lossy method that may be the best all the same; may be repeated"),
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the sweep's folder")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="do not resume")] = False,
) -> None:
    """Find the fastest lossless configuration of a pair on your prompts (or, with methods that you
    allow by name, the fastest of all).

    Where `specdec record` has recorded the same pair, prompts and settings, configurations are
    replayed from that, thousands in a minute. Interrupted, the same command goes on where it
    stopped.
    """
    if traces is not None and no_replay:
        raise UserError("--traces names a recording to replay, --no-replay forbids it: give one")
    drafts = parse_drafts(draft) if draft or target is not None else None
    overrides = given(
        max_new_tokens=max_new_tokens,
        trials=trials,
        prompts=given(source=prompts, limit=limit) or None,
        pair=given(target=target, drafts=drafts) or None,
        traces=traces,
        replay=False if no_replay else None,
        hardware=None if hardware is None else str(hardware),
        cluster=None if cluster is None else str(cluster),
        allow_lossy=allow_lossy or None,
    )
    plan = load_plan(config, **overrides)

    # Ray, torch and MLflow take seconds to import.
    from cluster.sweep.run import run_sweep
    from dashboards.progress import SweepProgress
    from dashboards.report import write_report
    from dashboards.tables import sentences, sweep_table
    from dashboards.tracking import SweepRun

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    progress = SweepProgress(console)
    try:
        with SweepRun(progress) as tracking:
            with progress:
                result, folder = run_sweep(plan, workspace(), name, fresh, [tracking, progress])
            report = write_report(result, folder.path)
            console.print(sweep_table(result))
            for label, sentence in sentences(result):
                console.print(f"{escape(label)}: [dim]{escape(sentence)}[/dim]", soft_wrap=True)
            if result.replay is not None:
                console.print(replay_line(result.replay), soft_wrap=True)
            with console.status("writing to MLflow"):
                version = tracking.finish(result, folder.path, report)
            folder.finish()
    except KeyboardInterrupt:
        console.print("interrupted; the same command resumes")
        sys.exit(130)
    champion = result.champion_trial
    found = f"[bold]{escape(result.labels[champion.id])}[/bold] ({champion.id})"
    if result.hardware is None:
        console.print(f"champion  {found}, version {version} of {result.pair.name}", soft_wrap=True)
    else:
        console.print(
            f"best      {found}, estimated for {result.hardware}: not timed and not registered",
            soft_wrap=True,
        )
    console.print(f"report    {report}", soft_wrap=True)
    print_runs_page(result.pair.name, "sweeps")
    if result.hardware is None:
        console.print(f"serve     {program('specdec')} serve", soft_wrap=True)


def replay_line(replay: ReplaySummary) -> str:
    """How many configurations a recording told, how fast, and what that saved."""
    line = f"replayed  {replay.configurations:,} configurations"
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


def given(**values: Any) -> dict[str, Any]:
    """The options that were given."""
    return {key: value for key, value in values.items() if value is not None}


def parse_drafts(specs: list[str] | None) -> dict[str, str]:
    """`[name=]model` options as a pair's drafts; unnamed ones are called by the model's name."""
    drafts: dict[str, str] = {}
    for spec in specs or []:
        name, separator, model = spec.partition("=")
        if not separator:
            name, model = Path(spec).name.rpartition(":")[2], spec
        if not name or not model:
            raise UserError(f"--draft {spec}: expected [name=]model")
        if name in drafts:
            raise UserError(
                f"--draft {spec}: there is a draft {name!r} already; name it: name={model}"
            )
        drafts[name] = model
    return drafts


if __name__ == "__main__":
    run(main)
