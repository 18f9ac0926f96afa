"""Compare bandits over drafters with each of their arms alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from jobs.console import console, deliver, run
from jobs.options import (
    ChatTemplate,
    Limit,
    MaxLength,
    Name,
    ProfileFile,
    Repeats,
    Tokens,
    chosen_pair,
)
from specdec_core.base.errors import UserError
from specdec_core.base.names import check_name
from specdec_core.base.workspace import workspace
from specdec_core.prompts.chat import AUTO

BANDITS = Path(__file__).parents[1] / "sweeps" / "bandits.yaml"


def main(
    config: Annotated[
        Path, Option(help="YAML with arms and bandits, and optionally pair and sampling.")
    ] = BANDITS,
    prompts: Annotated[
        list[str] | None,
        Option(help="Prompts: JSONL file, hub id or bundled:<name>; repeatable, they take turns."),
    ] = None,
    chat_template: ChatTemplate = AUTO,
    limit: Limit = 16,
    max_new_tokens: Tokens = 128,
    max_length: MaxLength = None,
    repeats: Repeats = 3,
    slots: Annotated[int, Option(min=1, help="Requests decoded together.")] = 1,
    traces: Annotated[
        str | None, Option(help="Recording to replay instead of decoding, a folder or a name.")
    ] = None,
    profile: ProfileFile = None,
    name: Name = None,
) -> None:
    """Decode prompts with bandits over drafters and with each of the arms alone, in turn in one
    process, and show tokens a second and the regret against the best arm in hindsight.

    With --traces, rounds are replayed and their times modelled. Otherwise run it on an idle
    machine. What the bandits have learned is kept with the result: `state: <name>/<id>` in a
    configuration starts from it.
    """
    if traces is not None and (prompts or slots > 1):
        raise UserError("--traces replays its own prompts one at a time: no --prompts, no --slots")
    if traces is not None and (chat_template != AUTO or max_length is not None):
        raise UserError("--traces replays what was read: no --chat-template, no --max-length")
    if traces is None and profile:
        raise UserError("--profile models the times of a replay: give --traces too")
    check_name(name)

    # torch and MLflow take seconds to import.
    from dashboards.progress import ConsoleProgress
    from dashboards.sections import ReportOrigin
    from research.bandits.comparison import ArmsPlan
    from research.bandits.report import report
    from research.bandits.runs import race_prompts, replay_recording, save
    from specdec_core.config import load_yaml, parse
    from specdec_core.search.replaying import find_named

    plan = parse(ArmsPlan, load_yaml(config), str(config))
    with ConsoleProgress(console) as progress:
        if traces is not None:
            recording = find_named(traces, workspace())
            plan = plan.under(recording.header.pair, recording.header.sampling)
            comparison, note = replay_recording(recording, plan, profile, progress)
        else:
            sources = prompts or ["bundled:held_out"]
            pair = chosen_pair(plan.pair, None, None, max_length)
            plan = plan.model_copy(update={"pair": pair})
            comparison, note = race_prompts(
                plan, sources, chat_template, limit, max_new_tokens, repeats, slots, progress
            )

    name = name or f"{config.stem}-{Path(traces).resolve().name if traces else plan.pair.name}"
    folder = workspace() / "bandits" / name
    params = {"config": str(config), "prompts": note, "slots": slots}
    origin = ReportOrigin(name=name, pair=plan.pair.name, notes=[note], params=params)
    deliver(report(comparison, origin), folder, "bandits", save(comparison, folder))


if __name__ == "__main__":
    run(main)
