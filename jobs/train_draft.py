"""Distil a draft with a reduced vocabulary from its target's own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from jobs.console import point, run
from jobs.options import (
    MaxLength,
    MaybeChatTemplate,
    TrainingSettings,
    given,
    training_settings,
)
from jobs.recorded_training import (
    AnsweredLimit,
    AnsweredPrompts,
    AnswerOptions,
    AnswersFolder,
    AnswerTokens,
    Minutes,
    Out,
    PromptTokens,
    Temperatures,
    TrainedFor,
    TrainingThreads,
    train_on_answers,
)


def main(
    target: TrainedFor = "bundled:target",
    prompts: AnsweredPrompts = None,
    limit: AnsweredLimit = None,
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
    learning_rate: Annotated[
        str, Option(help="AdamW's; the best of several, by agreement: 1e-3,2e-3.")
    ] = "2e-3",
    minutes: Minutes = None,
    setting: TrainingSettings = None,
    threads: TrainingThreads = 1,
    out: Out = None,
) -> None:
    """Train a small model that proposes its target's most frequent tokens, and save it.

    The target answers the prompts, its outputs are recorded, and the draft learns their
    distribution. With --set copied_layers=[0,1] the draft begins as these layers of the target,
    otherwise with random weights. Interrupted, the same command resumes.
    """
    options = AnswerOptions.of(locals())
    # Ray, torch and MLflow take seconds to import.
    from dashboards.reports.trained import agreement
    from specdec_core.training.kinds import DRAFT
    from specdec_core.training.reduced_draft.settings import DraftTrainingSettings

    settings, rates = training_settings(
        DraftTrainingSettings, setting, learning_rate, **given(minutes=minutes)
    )
    # The draft learns from the target's outputs alone: no layers.
    draft = train_on_answers(DRAFT, options, settings, rates, agreement, (), features)
    point("draft", draft.folder)


if __name__ == "__main__":
    run(main)
