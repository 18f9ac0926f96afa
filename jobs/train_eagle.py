"""Train an EAGLE-3 head for a target, on the target's own answers."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from jobs.console import point, run
from jobs.options import TrainingSettings, numbers, training_settings
from jobs.recorded_training import (
    Answers,
    Minutes,
    Out,
    PromptTokens,
    Start,
    TrainingThreads,
    train_on_answers,
)
from specdec_core.base.errors import UserError


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
    from specdec_core.models.eagle.settings import check_layers
    from specdec_core.models.fingerprints import fingerprint
    from specdec_core.models.loading import load_skeleton
    from specdec_core.training.eagle.settings import EagleTrainingSettings
    from specdec_core.training.eagle.start import trained_head
    from specdec_core.training.eagle.training import EagleTraining

    values = {"learning_rate": learning_rate, "start": start_from, "minutes": minutes}
    settings = training_settings(EagleTrainingSettings, setting, **values)

    def inputs(target: str) -> tuple[int, ...] | None:
        config = load_skeleton(target).config
        if settings.start is not None:
            if layers is not None:
                raise UserError(f"--layers: {settings.start} has its own")
            head = trained_head(settings.start, config, fingerprint(target))
            return head.settings.feature_layers
        if layers is None:
            return None
        chosen = numbers(layers, "--layers", int)
        last = config.get_text_config(decoder=True).num_hidden_layers
        check_layers(chosen, last, f"--layers {layers}")
        return chosen

    head = train_on_answers(
        EagleTraining, recording, prompt_tokens, inputs, settings, threads, out, acceptance
    )
    point("head", head)


if __name__ == "__main__":
    run(main)
