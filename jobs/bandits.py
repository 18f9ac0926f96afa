"""Compare bandits over drafters with each of their arms alone."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.console import console, run
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace

if TYPE_CHECKING:
    from specdec_core.prompts.prompt_sets import Prompt
    from specdec_core.studies.bandits import ArmComparison, ArmsPlan

BANDITS = Path(__file__).with_name("sweeps") / "bandits.yaml"


def main(
    config: Annotated[
        Path, typer.Option(help="YAML with arms and bandits; pair and sampling too, if wanted")
    ] = BANDITS,
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="JSONL file, hub id, bundled:…; of several, one in turn"),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Use the first n prompts of each.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each prompt.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Times each prompt is decoded.")] = 3,
    slots: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 1,
    traces: Annotated[
        str | None, typer.Option(help="replay a recording, a folder or a name, instead of decoding")
    ] = None,
    hardware: Annotated[
        Path | None, typer.Option(help="with --traces: forward times of another machine (YAML)")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="with --traces: the pair's forward times (JSON)")
    ] = None,
    learned: Annotated[
        str | None, typer.Option(help="earlier result, a name, whose bandits to go on with")
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the result's folder")] = None,
) -> None:
    """Decode prompts with bandits over drafters and with each of the arms alone, in turn in one
    process, and show tokens a second and the regret against the best arm in hindsight.

    By --traces rounds are replayed and their times modelled. Otherwise run it on an idle machine.
    What the bandits have learned is kept with the result: start from it with --learned, or with
    `state: <name>/<id>` in a configuration.
    """
    if traces is not None and (prompts or slots > 1):
        raise UserError("--traces replays its own prompts one at a time: no --prompts, no --slots")
    if traces is None and (hardware or profile):
        raise UserError("--hardware and --profile model the times of a replay: give --traces too")
    if hardware is not None and profile is not None:
        raise UserError("--hardware and --profile both give forward times: give one")
    if name is not None and (name in ("", "..") or Path(name).name != name):
        raise UserError(f"--name {name}: expected a folder's name, not a path")

    # torch and MLflow take seconds to import.
    from dashboards import bandits as shown
    from specdec_core.base.files import atomic_path, write_atomically
    from specdec_core.config import load_yaml, parse
    from specdec_core.studies.bandits import ArmsPlan, state_name

    plan = parse(ArmsPlan, load_yaml(config), str(config))
    if learned is not None:
        plan = plan.starting_from(workspace() / "bandits" / learned)
    if traces is not None:
        comparison, plan, notes = replayed(traces, plan, hardware, profile)
    else:
        sources = prompts or ["bundled:held_out"]
        comparison, notes = raced(plan, sources, limit, max_new_tokens, repeats, slots)

    table, shares = comparison.table(), comparison.shares()
    for note in notes:
        console.print(note, soft_wrap=True)
    console.print(shown.bandits_table(table))
    console.print(shown.headline(table), soft_wrap=True)
    if differing := int(table["differing"].sum()):
        console.print(f"{differing} outputs differ from autoregressive decoding's (near-ties)")

    name = name or f"{config.stem}-{Path(traces).resolve().name if traces else plan.pair.name}"
    folder = workspace() / "bandits" / name
    drawn = shown.drawings(comparison)
    files = [
        write_atomically(folder / "table.csv", table.to_csv(index=False)),
        write_atomically(folder / "shares.csv", shares.to_csv(index=False)),
        write_atomically(folder / "bandits.md", shown.markdown(table, shares, notes)),
        write_atomically(
            folder / "bandits.html", shown.page(comparison, drawn, name, plan.pair.name, notes)
        ),
    ]
    with atomic_path(folder / "rounds.parquet") as path:
        comparison.frame().to_parquet(path)
    for bandit in comparison.of("bandit"):
        if bandit.state is not None:
            path = folder / state_name(bandit.configuration)
            state = json.dumps(bandit.state, ensure_ascii=False, indent=1)
            files.append(write_atomically(path, state))
    files.append(folder / "rounds.parquet")
    params = {"config": str(config), "prompts": notes[0], "slots": slots, "learned": learned}
    shown.log_bandits(plan.pair.name, f"bandits {name}", params, comparison, drawn, files)
    console.print(f"figures   {folder / 'bandits.html'}", soft_wrap=True)


def raced(
    plan: ArmsPlan,
    sources: list[str],
    limit: int,
    max_new_tokens: int,
    repeats: int,
    slots: int,
) -> tuple[ArmComparison, list[str]]:
    """Decoded live, and what there is to say about it."""
    from rich.progress import Progress

    from specdec_core.models.pair import load_pair
    from specdec_core.prompts.prompt_sets import load_prompts
    from specdec_core.studies.bandits import race

    with console.status(f"loading {plan.pair.name}"):
        pair = load_pair(plan.pair)
    sets = [load_prompts(source, limit, pair.tokenizer) for source in sources]
    texts = mixed(sets)
    tokens = [tuple(pair.tokenizer(prompt.text)["input_ids"]) for prompt in texts]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("timing", total=repeats * -(-len(tokens) // slots))
        comparison = race(
            pair, plan, tokens, max_new_tokens, repeats, slots, lambda: progress.advance(task)
        )
    runner = pair.spec.runner
    return comparison, [
        f"{plan.pair.name}: {len(tokens)} prompts of {', '.join(sources)}, {max_new_tokens} new "
        f"tokens, {repeats} repeats, {slots} at a time; {runner.device}, target "
        f"{runner.target_dtype}, draft {runner.draft_dtype}, threads {runner.threads}"
    ]


def mixed(sets: list[list[Prompt]]) -> list[Prompt]:
    """One prompt of each set in turn, so that a bandit meets a mixture."""
    return [prompt for row in zip_longest(*sets) for prompt in row if prompt is not None]


def replayed(
    traces: str, plan: ArmsPlan, hardware: Path | None, profile: Path | None
) -> tuple[ArmComparison, ArmsPlan, list[str]]:
    """From a recording, and what there is to say about it; the plan on what was recorded."""
    from rich.progress import Progress

    from jobs.times import forward_times
    from specdec_core.recordings.replay import Replay
    from specdec_core.search.replaying import find_named
    from specdec_core.studies.bandits import replay_all

    recording = find_named(traces, workspace())
    header = recording.header
    plan = plan.under(header.pair, header.sampling)
    entrants = plan.entrants
    times = forward_times(header.pair, [e.configuration for e in entrants], hardware, profile)
    replay = Replay(recording, profile=times)
    unknown = [e.name for e in entrants if not replay.can(e.configuration)]
    if unknown:
        raise UserError(f"{recording.folder}: does not tell what {unknown[0]} would do")
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("replaying", total=len(entrants))
        comparison = replay_all(replay, plan, times, lambda: progress.advance(task))
    return (
        comparison,
        plan,
        [
            f"{recording.folder.name}: replayed, {header.prompts.count} prompts of "
            f"{header.prompts.source}, {header.max_new_tokens} new tokens; times modelled for "
            f"{times.device}"
        ],
    )


if __name__ == "__main__":
    run(main)
