"""Distil a draft with a reduced vocabulary from its target's own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from jobs.console import console, interruptible, point, run
from jobs.options import MaybeChatTemplate, given, numbers
from specdec_core.base.errors import UserError
from specdec_core.base.files import locked
from specdec_core.base.workspace import workspace


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
        Path | None, Option(help="Folder of answers; unset, `answers` beside the draft.")
    ] = None,
    features: Annotated[
        Path | None,
        Option(help="Folder of features that a training has recorded; unset, they are recorded."),
    ] = None,
    new_tokens: Annotated[int, Option(min=2, help="The longest answer.")] = 160,
    temperatures: Annotated[str, Option(help="Prompts are answered at, in turn.")] = "0,1",
    slots: Annotated[int, Option(min=1, help="Prompts that are answered at a time.")] = 32,
    draft_vocab: Annotated[int | None, Option(help="Tokens that the draft can propose.")] = None,
    width: Annotated[int | None, Option(help="Of the draft's states.")] = None,
    layers: Annotated[int | None, Option(help="The draft's decoder layers.")] = None,
    inner: Annotated[int | None, Option(help="Width inside a layer's MLP.")] = None,
    heads: Annotated[int | None, Option(help="Attention heads of a layer.")] = None,
    key_value_heads: Annotated[int | None, Option(help="Heads of keys and values.")] = None,
    embedding: Annotated[
        str | None, Option(help="target: projected from the target's; own: stored.")
    ] = None,
    form: Annotated[
        str | None, Option(help="Of stored matrices: int8 or plain (bfloat16).")
    ] = None,
    learning_rate: Annotated[
        str, Option(help="AdamW's; the best of several, by agreement: 1e-3,2e-3.")
    ] = "2e-3",
    batch_tokens: Annotated[int | None, Option(help="Tokens of answers of a step.")] = None,
    epochs: Annotated[int | None, Option(help="Passes over the answers.")] = None,
    minutes: Annotated[
        float | None, Option(help="Train for so long instead; the schedule is fitted to it.")
    ] = None,
    threads: Annotated[int, Option(min=1, help="Of the target, and of each training.")] = 1,
    seed: Annotated[int, Option(help="Of weights and order.")] = 0,
    out: Annotated[Path | None, Option(help="Folder; unset, one in the workspace.")] = None,
) -> None:
    """Train a small model that proposes its target's most frequent tokens, and save it.

    The target answers the prompts, what it computes is recorded, and the draft learns its
    distribution. Interrupted, the same command goes on.
    """
    rates = numbers(learning_rate, "--learning-rate", float)

    # Ray, torch and MLflow take seconds to import.
    from cluster.recorded_training import train
    from cluster.session import ray_session
    from dashboards.outputs.console import show
    from dashboards.progress import TrainingProgress
    from dashboards.reports.trained_draft import agreement
    from dashboards.tracking.training_run import TrainingRun
    from specdec_core.config import PairSpec, RunnerSettings, parse
    from specdec_core.models.pair import check_pair
    from specdec_core.prompts.chat import AUTO
    from specdec_core.training.kinds import DRAFT
    from specdec_core.training.recorded.features import check_features
    from specdec_core.training.recorded.gather import gather_answers, gather_features
    from specdec_core.training.recorded.prompts import token_prompts
    from specdec_core.training.reduced_draft.settings import DraftTrainingSettings

    chosen = given(
        draft_vocab_size=draft_vocab,
        width=width,
        layers=layers,
        inner=inner,
        heads=heads,
        key_value_heads=key_value_heads,
        embedding=embedding,
        form=form,
        batch_tokens=batch_tokens,
        epochs=epochs,
        minutes=minutes,
    )
    for rate in rates:
        values: dict[str, Any] = {**chosen, "learning_rate": rate, "seed": seed}
        settings = parse(DraftTrainingSettings, values, "training settings")
    heats = numbers(temperatures, "--temperatures", float)
    spec = PairSpec(target=target, drafts={}, runner=RunnerSettings(device="cpu", threads=threads))
    out = (out or workspace() / "drafts" / spec.name.removeprefix("bundled-")).absolute()
    answers = (answers or out / "answers").absolute()
    if features is None and prompts is None and not (answers / "answers.json").exists():
        raise UserError(f"{answers}: no answers in it; give --prompts to have some written")
    tokenizer = check_pair(spec)
    params = {
        "target": target,
        "answers": str(answers),
        "prompts": prompts,
        "features": str(features) if features else None,
        "settings": settings.model_dump(mode="json", exclude={"learning_rate"}),
        "learning_rates": list(rates),
        "out": str(out),
    }
    with interruptible(), locked(out, "training"):
        with TrainingProgress(console) as progress:
            if prompts is not None:
                found = token_prompts(
                    prompts, tokenizer, limit, prompt_tokens, chat_template or AUTO
                )
                gather_answers(spec, found, answers, new_tokens, heats, slots, progress)
            if features is None:
                features = gather_features(spec, (), answers, out, progress, console.print)
            else:
                check_features(features, target)
        with ray_session(), TrainingRun(DRAFT, spec, params) as tracking:
            with TrainingProgress(console) as progress:
                observers = [tracking, progress]
                draft = train(DRAFT, features, settings, rates, out, threads, observers)
            show(console, [agreement(draft)])
            with console.status("writing to MLflow"):
                tracking.finish(draft)
    point("draft", draft.folder)


if __name__ == "__main__":
    run(main)
