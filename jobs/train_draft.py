"""Distil a draft with a reduced vocabulary from its target's own answers."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from jobs.console import point, run
from jobs.options import TrainingSettings, training_settings
from jobs.recorded_training import (
    Answers,
    Minutes,
    Out,
    PromptTokens,
    Start,
    TrainingThreads,
    train_on_answers,
)


def main(
    recording: Answers,
    prompt_tokens: PromptTokens = 400,
    learning_rate: Annotated[float, Option(help="AdamW's, at its peak.")] = 2e-3,
    start_from: Start = None,
    minutes: Minutes = None,
    setting: TrainingSettings = None,
    threads: TrainingThreads = None,
    out: Out = None,
) -> None:
    """Train a small model that proposes its target's most frequent tokens, and save it.

    The target's outputs on the recorded answers are stored, and the draft learns their
    distribution. With --set copied_layers=[0,1] the draft begins as these layers of the target,
    otherwise with random weights. Interrupted, the same command resumes.
    """
    # torch and MLflow take seconds to import.
    from dashboards.reports.trained import agreement
    from specdec_core.training.reduced_draft.settings import DraftTrainingSettings
    from specdec_core.training.reduced_draft.start import trained_draft
    from specdec_core.training.reduced_draft.training import DraftTraining

    values = {"learning_rate": learning_rate, "start": start_from, "minutes": minutes}
    settings = training_settings(DraftTrainingSettings, setting, **values)

    def inputs(target: str) -> tuple[int, ...]:
        if settings.start is not None:
            trained_draft(settings.start, target)
        return ()  # it learns from the target's outputs alone

    draft = train_on_answers(
        DraftTraining, recording, prompt_tokens, inputs, settings, threads, out, agreement
    )
    point("draft", draft)


if __name__ == "__main__":
    run(main)
