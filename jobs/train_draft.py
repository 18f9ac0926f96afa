"""Distil a draft with a reduced vocabulary from its target's own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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


def main(
    target: TrainedFor = "bundled:target",
    prompts: AnsweredPrompts = None,
    limit: Annotated[int | None, Option(min=1, help="Use the first n prompts; unset, all.")] = None,
    chat_template: MaybeChatTemplate = None,
    prompt_tokens: PromptTokens = 400,
    answers: AnswersFolder = None,
    features: Annotated[
        Path | None,
        Option(help="Folder of features that a training has recorded; unset, they are recorded."),
    ] = None,
    new_tokens: AnswerTokens = 160,
    max_length: MaxLength = None,
    temperatures: Temperatures = "0,1",
    slots: AnswerSlots = 32,
    draft_vocab: Annotated[
        int | None, Option(help="Tokens that the draft can propose; unset, 8192.")
    ] = None,
    copy_layers: Annotated[
        str | None,
        Option(
            help="Begin as these layers of the target (0,1), with its embedding and output layer;"
            " unset, with random weights of the shape below."
        ),
    ] = None,
    width: Annotated[int | None, Option(help="Of the draft's states; unset, 384.")] = None,
    layers: Annotated[int | None, Option(help="The draft's decoder layers; unset, 4.")] = None,
    inner: Annotated[int | None, Option(help="Width inside a layer's MLP; unset, 1024.")] = None,
    heads: Annotated[int | None, Option(help="Attention heads of a layer; unset, 6.")] = None,
    key_value_heads: Annotated[
        int | None, Option(help="Heads of keys and values; unset, 3.")
    ] = None,
    embedding: Annotated[
        str | None, Option(help="target: projected from the target's; own: stored; unset, target.")
    ] = None,
    form: Annotated[
        str | None, Option(help="Of stored matrices: int8 or plain (bfloat16); unset, int8.")
    ] = None,
    learning_rate: Annotated[
        str, Option(help="AdamW's; the best of several, by agreement: 1e-3,2e-3.")
    ] = "2e-3",
    batch_tokens: BatchTokens = None,
    epochs: Epochs = None,
    minutes: Minutes = None,
    threads: TrainingThreads = 1,
    seed: Seed = 0,
    further: Further = False,
    out: Out = None,
) -> None:
    """Train a small model that proposes its target's most frequent tokens, and save it.

    The target answers the prompts, what it computes is recorded, and the draft learns its
    distribution. Interrupted, the same command goes on.
    """
    rates = numbers(learning_rate, "--learning-rate", float)
    copied = numbers(copy_layers, "--copy-layers", int) if copy_layers else None

    # Ray, torch and MLflow take seconds to import.
    from dashboards.reports.trained_draft import agreement
    from specdec_core.config import parse
    from specdec_core.training.kinds import DRAFT
    from specdec_core.training.reduced_draft.settings import DraftTrainingSettings

    values = given(
        draft_vocab_size=draft_vocab,
        copied_layers=copied,
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
        seed=seed,
    )
    settings = [
        parse(DraftTrainingSettings, {**values, "learning_rate": rate}, "training settings")
        for rate in rates
    ]
    draft = train_on_answers(
        DRAFT,
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
        (),  # of what the target computes it needs its output alone
        features,
        settings,
        out,
        threads,
        agreement,
        further,
    )
    point("draft", draft.folder)


if __name__ == "__main__":
    run(main)
