"""Train an EAGLE-3 head for a target, on the target's own answers."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from jobs.console import point, run
from jobs.options import TrainingSettings, given, numbers, training_settings
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
    layers: Annotated[
        str | None, Option(help="Layers whose inputs the head takes: 2,15,27; unset, three.")
    ] = None,
    learning_rate: Annotated[float, Option(help="AdamW's, at its peak.")] = 1e-3,
    start_from: Start = None,
    minutes: Minutes = None,
    setting: TrainingSettings = None,
    threads: TrainingThreads = None,
    out: Out = None,
) -> None:
    """Train a head that drafts from the target's hidden states, and save it.

    The target's hidden states of the recorded answers are stored, and the head is trained on them.
    Interrupted, the same command resumes.
    """
    # torch and MLflow take seconds to import.
    from dashboards.reports.trained import acceptance
    from specdec_core.models.eagle.loading import head_settings
    from specdec_core.models.eagle.settings import check_layers
    from specdec_core.models.loading import load_skeleton
    from specdec_core.training.eagle.settings import EagleTrainingSettings
    from specdec_core.training.eagle.training import EagleTraining

    settings = training_settings(
        EagleTrainingSettings,
        setting,
        learning_rate=learning_rate,
        **given(start=start_from, minutes=minutes),
    )

    def inputs(target: str) -> tuple[int, ...] | None:
        model = load_skeleton(target).config.get_text_config(decoder=True)
        if layers is None:
            start = settings.start
            return None if start is None else head_settings(start, model).feature_layers
        chosen = numbers(layers, "--layers", int)
        check_layers(chosen, model.num_hidden_layers, "--layers")
        return chosen

    head = train_on_answers(
        EagleTraining, recording, prompt_tokens, inputs, settings, threads, out, acceptance
    )
    point("head", head)


if __name__ == "__main__":
    run(main)
