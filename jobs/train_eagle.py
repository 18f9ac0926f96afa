"""Train an EAGLE-3 head for a target, on the target's own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from jobs.console import console, interruptible, point, run
from jobs.options import MaybeChatTemplate, given, numbers
from specdec_core.base.errors import UserError
from specdec_core.base.files import locked
from specdec_core.base.workspace import workspace

_QUICK: dict[str, Any] = {"draft_vocab_size": 512, "minutes": 1.0, "evaluations": 4}


def main(
    target: Annotated[
        str,
        Option(help="Target model: hub id, folder, GGUF file, package:<name> or bundled:<name>."),
    ] = "bundled:target",
    prompts: Annotated[
        str | None,
        Option(
            help="Prompts to answer: JSONL file, hub data set or bundled:<name>; unset, the answers"
            " that are there."
        ),
    ] = None,
    limit: Annotated[int | None, Option(min=1, help="Use the first n prompts.")] = None,
    chat_template: MaybeChatTemplate = None,
    prompt_tokens: Annotated[int, Option(min=1, help="Prompts of more tokens are left out.")] = 400,
    answers: Annotated[
        Path | None, Option(help="Folder of answers; unset, `answers` beside the head.")
    ] = None,
    new_tokens: Annotated[int, Option(min=2, help="The longest answer.")] = 160,
    temperatures: Annotated[str, Option(help="Prompts are answered at, in turn.")] = "0,1",
    slots: Annotated[int, Option(min=1, help="Prompts that are answered at a time.")] = 32,
    draft_vocab: Annotated[int | None, Option(help="Tokens that the head can propose.")] = None,
    layers: Annotated[
        str | None, Option(help="Layers whose inputs the head reads: 2,15,27; unset, three.")
    ] = None,
    steps: Annotated[int | None, Option(help="Steps of the training-time test.")] = None,
    share: Annotated[
        float | None, Option(help="Share of the chains that go on: a step's weight.")
    ] = None,
    learning_rate: Annotated[
        str, Option(help="AdamW's; the best of several, by accepted tokens: 5e-4,1e-3.")
    ] = "1e-3",
    batch_tokens: Annotated[int | None, Option(help="Tokens of answers of a step.")] = None,
    epochs: Annotated[int | None, Option(help="Passes over the answers.")] = None,
    minutes: Annotated[
        float | None, Option(help="Train for so long instead; the schedule is fitted to it.")
    ] = None,
    threads: Annotated[int, Option(min=1, help="Of the target, and of each training.")] = 1,
    seed: Annotated[int, Option(help="Of weights and order.")] = 0,
    out: Annotated[Path | None, Option(help="Folder; unset, one in the workspace.")] = None,
    quick: Annotated[bool, Option("--quick", help="A minute, on few answers.")] = False,
) -> None:
    """Train a head that drafts from what its target has computed, and save it.

    The target answers the prompts, its features of the answers are recorded, and the head is
    trained on them. Interrupted, the same command goes on.
    """
    rates = numbers(learning_rate, "--learning-rate", float)

    # Ray, torch and MLflow take seconds to import.
    from cluster.recorded_training import train
    from cluster.session import ray_session
    from dashboards.outputs.console import show
    from dashboards.progress import TrainingProgress
    from dashboards.reports.eagle import acceptance
    from dashboards.tracking.training_run import TrainingRun
    from specdec_core.config import PairSpec, RunnerSettings, parse
    from specdec_core.models.pair import check_pair
    from specdec_core.prompts.chat import AUTO
    from specdec_core.training.eagle.settings import EagleTrainingSettings
    from specdec_core.training.kinds import HEAD
    from specdec_core.training.recorded.gather import gather_answers, gather_features
    from specdec_core.training.recorded.prompts import token_prompts

    if quick and prompts is None and answers is None:
        prompts, limit, new_tokens = "bundled:train", limit or 200, min(new_tokens, 64)
    chosen = given(
        draft_vocab_size=draft_vocab,
        steps=steps,
        share=share,
        batch_tokens=batch_tokens,
        epochs=epochs,
        minutes=minutes,
    )
    for rate in rates:
        values = {**(_QUICK if quick else {}), **chosen, "learning_rate": rate, "seed": seed}
        settings = parse(EagleTrainingSettings, values, "training settings")
    heats = numbers(temperatures, "--temperatures", float)
    read = numbers(layers, "--layers", int) if layers else None
    spec = PairSpec(target=target, drafts={}, runner=RunnerSettings(device="cpu", threads=threads))
    out = (out or workspace() / "eagle" / spec.name.removeprefix("bundled-")).absolute()
    answers = (answers or out / "answers").absolute()
    if prompts is None and not (answers / "answers.json").exists():
        raise UserError(f"{answers}: no answers in it; give --prompts to have some written")
    params = {
        "target": target,
        "answers": str(answers),
        "prompts": prompts,
        "settings": settings.model_dump(mode="json", exclude={"learning_rate"}),
        "learning_rates": list(rates),
        "out": str(out),
    }
    with interruptible(), locked(out, "training"):
        with TrainingProgress(console) as progress:
            if prompts is not None:
                tokenizer = check_pair(spec)
                found = token_prompts(
                    prompts, tokenizer, limit, prompt_tokens, chat_template or AUTO
                )
                gather_answers(spec, found, answers, new_tokens, heats, slots, progress)
            features = gather_features(spec, read, answers, out, progress, console.print)
        with ray_session(), TrainingRun(HEAD, spec, params) as tracking:
            with TrainingProgress(console) as progress:
                observers = [tracking, progress]
                head = train(HEAD, features, settings, rates, out, threads, observers)
            show(console, [acceptance(head)])
            with console.status("writing to MLflow"):
                tracking.finish(head)
    point("head", head.folder)


if __name__ == "__main__":
    run(main)
