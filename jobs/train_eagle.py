"""Train an EAGLE-3 head for a target, on the target's own answers."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from jobs.console import point, run
from jobs.options import (
    MaxLength,
    MaybeChatTemplate,
    TrainingSettings,
    given,
    numbers,
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

_QUICK: dict[str, Any] = {"draft_vocab_size": 512, "minutes": 1.0, "evaluations": 4}


def main(
    target: TrainedFor = "bundled:target",
    prompts: AnsweredPrompts = None,
    limit: AnsweredLimit = None,
    chat_template: MaybeChatTemplate = None,
    prompt_tokens: PromptTokens = 400,
    answers: AnswersFolder = None,
    new_tokens: AnswerTokens = 160,
    max_length: MaxLength = None,
    temperatures: Temperatures = "0,1",
    layers: Annotated[
        str | None, Option(help="Layers whose inputs the head takes: 2,15,27; unset, three.")
    ] = None,
    learning_rate: Annotated[
        str, Option(help="AdamW's; the best of several, by accepted tokens: 5e-4,1e-3.")
    ] = "1e-3",
    minutes: Minutes = None,
    setting: TrainingSettings = None,
    threads: TrainingThreads = 1,
    out: Out = None,
    quick: Annotated[bool, Option("--quick", help="A minute, on few answers.")] = False,
) -> None:
    """Train a head that drafts from the target's hidden states, and save it.

    The target answers the prompts, its hidden states of the answers are recorded, and the head is
    trained on them. Interrupted, the same command resumes.
    """
    # Ray, torch and MLflow take seconds to import.
    from dashboards.reports.trained import acceptance
    from specdec_core.models.eagle.settings import check_layers
    from specdec_core.models.loading import load_skeleton
    from specdec_core.training.eagle.settings import EagleTrainingSettings
    from specdec_core.training.kinds import HEAD

    if quick and prompts is None and answers is None:
        prompts, limit, new_tokens = "bundled:train", limit or 200, min(new_tokens, 64)
    options = AnswerOptions.of(locals())
    values = {**(_QUICK if quick else {}), **given(minutes=minutes)}
    settings, rates = training_settings(EagleTrainingSettings, setting, learning_rate, **values)
    inputs = numbers(layers, "--layers", int) if layers else None
    if inputs:
        model = load_skeleton(target).config.get_text_config(decoder=True)
        check_layers(inputs, model.num_hidden_layers, "--layers")
    head = train_on_answers(HEAD, options, settings, rates, acceptance, inputs)
    point("head", head.folder)


if __name__ == "__main__":
    run(main)
