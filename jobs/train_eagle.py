"""Train an EAGLE-3 head for a target, on the target's own answers."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from jobs.console import point, run
from jobs.options import MaxLength, MaybeChatTemplate, given, numbers
from jobs.recorded_training import (
    AnsweredPrompts,
    Answering,
    AnswersFolder,
    AnswerSlots,
    AnswerTokens,
    BatchTokens,
    Epochs,
    Further,
    Minutes,
    Out,
    PromptTokens,
    Seed,
    Temperatures,
    TrainedFor,
    TrainingThreads,
    train_on_answers,
)

_QUICK: dict[str, Any] = {"draft_vocab_size": 512, "minutes": 1.0, "evaluations": 4}


def main(
    target: TrainedFor = "bundled:target",
    prompts: AnsweredPrompts = None,
    limit: Annotated[int | None, Option(min=1, help="Use the first n prompts; unset, all.")] = None,
    chat_template: MaybeChatTemplate = None,
    prompt_tokens: PromptTokens = 400,
    answers: AnswersFolder = None,
    new_tokens: AnswerTokens = 160,
    max_length: MaxLength = None,
    temperatures: Temperatures = "0,1",
    slots: AnswerSlots = 32,
    draft_vocab: Annotated[
        int | None, Option(help="Tokens that the head can propose; unset, 8192.")
    ] = None,
    layers: Annotated[
        str | None, Option(help="Layers whose inputs the head reads: 2,15,27; unset, three.")
    ] = None,
    steps: Annotated[int | None, Option(help="Steps of the training-time test; unset, 5.")] = None,
    share: Annotated[
        float | None, Option(help="Share of the chains that go on: a step's weight; unset, 0.8.")
    ] = None,
    learning_rate: Annotated[
        str, Option(help="AdamW's; the best of several, by accepted tokens: 5e-4,1e-3.")
    ] = "1e-3",
    batch_tokens: BatchTokens = None,
    epochs: Epochs = None,
    minutes: Minutes = None,
    threads: TrainingThreads = 1,
    seed: Seed = 0,
    further: Further = False,
    out: Out = None,
    quick: Annotated[bool, Option("--quick", help="A minute, on few answers.")] = False,
) -> None:
    """Train a head that drafts from what its target has computed, and save it.

    The target answers the prompts, its features of the answers are recorded, and the head is
    trained on them. Interrupted, the same command goes on.
    """
    rates = numbers(learning_rate, "--learning-rate", float)

    # Ray, torch and MLflow take seconds to import.
    from dashboards.reports.eagle import acceptance
    from specdec_core.config import parse
    from specdec_core.models.eagle.checks import check_layers
    from specdec_core.models.loading import load_skeleton
    from specdec_core.training.eagle.settings import EagleTrainingSettings
    from specdec_core.training.kinds import HEAD

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
    values = {**(_QUICK if quick else {}), **chosen, "seed": seed}
    settings = [
        parse(EagleTrainingSettings, {**values, "learning_rate": rate}, "training settings")
        for rate in rates
    ]
    read = numbers(layers, "--layers", int) if layers else None
    if read:
        text = load_skeleton(target).config.get_text_config(decoder=True)
        check_layers(read, text.num_hidden_layers, "--layers")
    head = train_on_answers(
        HEAD,
        target,
        Answering(
            answers,
            prompts,
            limit,
            chat_template,
            prompt_tokens,
            new_tokens,
            temperatures,
            slots,
            max_length,
        ),
        read,
        None,
        settings,
        out,
        threads,
        acceptance,
        further,
    )
    point("head", head.folder)


if __name__ == "__main__":
    run(main)
