"""Compare bandits over drafters with each of their arms alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs.console import console, deliver, run
from jobs.options import (
    Hardware,
    Limit,
    Name,
    ProfileFile,
    Repeats,
    Tokens,
    check_name,
    check_times,
)
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace

if TYPE_CHECKING:
    from specdec_core.prompts.prompt_sets import Prompt
    from specdec_core.studies.bandits import ArmComparison, ArmsPlan

BANDITS = Path(__file__).with_name("sweeps") / "bandits.yaml"


def main(
    config: Annotated[
        Path, Option(help="YAML with arms and bandits; pair and sampling too, if wanted.")
    ] = BANDITS,
    prompts: Annotated[
        list[str] | None,
        Option(help="Prompts: JSONL file, hub id or bundled:<name>; of several, one in turn."),
    ] = None,
    limit: Limit = 16,
    max_new_tokens: Tokens = 128,
    repeats: Repeats = 3,
    slots: Annotated[int, Option(min=1, help="Requests decoded together.")] = 1,
    traces: Annotated[
        str | None, Option(help="Recording to replay instead of decoding, a folder or a name.")
    ] = None,
    hardware: Hardware = None,
    profile: ProfileFile = None,
    learned: Annotated[
        str | None, Option(help="Earlier result, a name, whose bandits to go on with.")
    ] = None,
    name: Name = None,
) -> None:
    """Decode prompts with bandits over drafters and with each of the arms alone, in turn in one
    process, and show tokens a second and the regret against the best arm in hindsight.

    With --traces, rounds are replayed and their times modelled. Otherwise run it on an idle
    machine. What the bandits have learned is kept with the result: start from it with --learned, or
    with `state: <name>/<id>` in a configuration.
    """
    if traces is not None and (prompts or slots > 1):
        raise UserError("--traces replays its own prompts one at a time: no --prompts, no --slots")
    if traces is None and (hardware or profile):
        raise UserError("--hardware and --profile model the times of a replay: give --traces too")
    check_times(hardware, profile)
    check_name(name)

    # torch and MLflow take seconds to import.
    from dashboards.reports.bandits import report
    from dashboards.sections import Origin
    from specdec_core.config import load_yaml, parse
    from specdec_core.studies.bandits import ArmsPlan

    plan = parse(ArmsPlan, load_yaml(config), str(config))
    if learned is not None:
        plan = plan.starting_from(workspace() / "bandits" / learned)
    if traces is not None:
        comparison, plan, note = replayed(traces, plan, hardware, profile)
    else:
        sources = prompts or ["bundled:held_out"]
        comparison, note = raced(plan, sources, limit, max_new_tokens, repeats, slots)

    name = name or f"{config.stem}-{Path(traces).resolve().name if traces else plan.pair.name}"
    folder = workspace() / "bandits" / name
    params = {"config": str(config), "prompts": note, "slots": slots, "learned": learned}
    origin = Origin(name=name, pair=plan.pair.name, notes=[note], params=params)
    deliver(report(comparison, origin), folder, "bandits", save(comparison, folder))


def raced(
    plan: ArmsPlan,
    sources: Sequence[str],
    limit: int,
    max_new_tokens: int,
    repeats: int,
    slots: int,
) -> tuple[ArmComparison, str]:
    """Decoded live, and what was decoded."""
    from dashboards.progress import ConsoleProgress
    from specdec_core.models.pair import load_pair
    from specdec_core.prompts.prompt_sets import load_prompts
    from specdec_core.studies.bandits import race

    with console.status(f"loading {plan.pair.name}"):
        pair = load_pair(plan.pair)
    texts = list(mixed([load_prompts(source, limit, pair.tokenizer) for source in sources]))
    tokens = [tuple(pair.tokenizer(prompt.text)["input_ids"]) for prompt in texts]
    with ConsoleProgress(console) as progress:
        comparison = race(pair, plan, tokens, max_new_tokens, repeats, slots, progress)
    runner = pair.spec.runner
    return comparison, (
        f"{plan.pair.name}: {len(tokens)} prompts of {', '.join(sources)}, {max_new_tokens} new "
        f"tokens, {repeats} repeats, {slots} at a time; {runner.device}, target "
        f"{runner.target_dtype}, draft {runner.draft_dtype}, threads {runner.threads}"
    )


def mixed(sets: Sequence[Sequence[Prompt]]) -> Iterator[Prompt]:
    """One prompt of each set in turn, so that a bandit meets a mixture."""
    return (prompt for row in zip_longest(*sets) for prompt in row if prompt is not None)


def replayed(
    traces: str, plan: ArmsPlan, hardware: Path | None, profile: Path | None
) -> tuple[ArmComparison, ArmsPlan, str]:
    """From a recording, the plan on what was recorded, and what was replayed."""
    from dashboards.progress import ConsoleProgress
    from specdec_core.recordings.replay import Replay
    from specdec_core.search.replaying import find_named
    from specdec_core.studies.bandits import replay_all
    from specdec_core.studies.forward_times import forward_times

    recording = find_named(traces, workspace())
    header = recording.header
    plan = plan.under(header.pair, header.sampling)
    asked = [entrant.configuration for entrant in plan.entrants]
    with ConsoleProgress(console) as progress:
        times = forward_times(header.pair, asked, hardware, profile, progress)
        comparison = replay_all(Replay(recording, profile=times), plan, times, progress)
    note = (
        f"{recording.folder.name}: replayed, {header.prompts.count} prompts of "
        f"{header.prompts.source}, {header.max_new_tokens} new tokens; times modelled for "
        f"{times.device}"
    )
    return comparison, plan, note


def save(comparison: ArmComparison, folder: Path) -> list[Path]:
    """Write the rounds and what the bandits have learned; returns the files."""
    from specdec_core.base.files import atomic_path, write_atomically
    from specdec_core.studies.bandits import state_name

    with atomic_path(folder / "rounds.parquet") as path:
        comparison.frame().to_parquet(path)
    return [
        folder / "rounds.parquet",
        *(
            write_atomically(
                folder / state_name(bandit.configuration),
                json.dumps(bandit.state, ensure_ascii=False, indent=1),
            )
            for bandit in comparison.of("bandit")
            if bandit.state is not None
        ),
    ]


if __name__ == "__main__":
    run(main)
