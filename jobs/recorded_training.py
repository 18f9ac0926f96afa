"""The part that `specdec train eagle` and `specdec train draft` share: both train a model on the
answers of its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from typer import Option

from jobs.console import console, interruptible
from jobs.options import chosen_pair, numbers
from specdec_core.base.errors import UserError
from specdec_core.base.files import locked
from specdec_core.base.workspace import workspace

if TYPE_CHECKING:
    from dashboards.sections import Section
    from specdec_core.config import PairSpec
    from specdec_core.training.finished import Finished
    from specdec_core.training.kinds import TrainedKind
    from specdec_core.training.recorded.settings import TrainingSettings

TrainedFor = Annotated[
    str,
    Option(help="Target model: hub id, folder, GGUF file, package:<name> or bundled:<name>."),
]
AnsweredPrompts = Annotated[
    str | None,
    Option(
        help="Prompts to answer: JSONL file, hub data set or bundled:<name>; unset, the answers"
        " that the folder has."
    ),
]
AnsweredLimit = Annotated[int | None, Option(min=1, help="Use the first n prompts; unset, all.")]
PromptTokens = Annotated[int, Option(min=1, help="Prompts of more tokens are left out.")]
AnswersFolder = Annotated[
    Path | None, Option(help="Folder of answers; unset, `answers` in the output folder.")
]
AnswerTokens = Annotated[int, Option(min=2, help="The longest answer.")]
Temperatures = Annotated[str, Option(help="Temperatures of the answers, one after the other.")]
Minutes = Annotated[
    float | None,
    Option(help="Train for this time, with a schedule that fits it; unset, by the epochs."),
]
TrainingThreads = Annotated[int, Option(min=1, help="Of the target, and of each training.")]
Out = Annotated[
    Path | None, Option(help="Folder; unset, one of the target's name in the workspace.")
]

SLOTS = 32  # prompts that the target answers at a time


@dataclass(frozen=True)
class AnswerOptions:
    """The options that both commands have."""

    target: str
    prompts: str | None
    limit: int | None
    chat_template: str | None
    prompt_tokens: int
    answers: Path | None
    new_tokens: int
    max_length: int | None
    temperatures: str
    threads: int
    out: Path | None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Those among the `options` of a command, by name."""
        return cls(**{each.name: options[each.name] for each in fields(cls)})


def train_on_answers(
    kind: TrainedKind,
    options: AnswerOptions,
    settings: TrainingSettings,
    rates: tuple[float, ...],
    report: Callable[[Finished[Any]], Section],
    layers: tuple[int, ...] | None = None,
    features: Path | None = None,
) -> Finished[Any]:
    """Have the target answer `prompts`, record its features of the answers, train with each of the
    learning rates and keep the best model. Answers and features on disk are not made again.

    Features of `layers` are recorded, by default of the usual layers; `features` is a folder of
    features to read instead.

    Raises:
        UserError: bad input, by name.
    """
    from cluster.recorded_training import train
    from cluster.session import ray_session
    from dashboards.outputs.console import show
    from dashboards.progress import TrainingProgress
    from dashboards.tracking.training_run import log_training
    from specdec_core.config import PairSpec, RunnerSettings
    from specdec_core.training.recorded.answers import read_card
    from specdec_core.training.recorded.features import check_features
    from specdec_core.training.recorded.gather import gather_features

    target, prompts, temperatures = options.target, options.prompts, options.temperatures
    answered_at = numbers(temperatures, "--temperatures", float)
    runner = RunnerSettings(device="cpu", threads=options.threads)
    spec = PairSpec(target=target, drafts={}, runner=runner)
    spec = chosen_pair(spec, None, None, options.max_length)
    name = spec.name.removeprefix("bundled-")
    out = (options.out or workspace() / kind.workspace / name).absolute()
    answers = (options.answers or out / "answers").absolute()
    if features is not None:
        check_features(features, target)
    elif prompts is not None:
        _check_temperatures(kind, answered_at, f"--temperatures {temperatures}")
    elif (answers / "answers.json").exists():
        _check_temperatures(kind, read_card(answers).temperatures, str(answers))
    else:
        raise UserError(f"{answers}: no answers in it; give --prompts to have some written")
    params = {
        "target": target,
        "answers": str(answers),
        "prompts": prompts,
        "settings": settings.model_dump(mode="json", exclude={"learning_rate"}),
        "learning_rates": list(rates),
        "out": str(out),
        **({"features": str(features)} if features else {}),
    }
    with interruptible(), locked(out, "training"):
        if features is None:
            with TrainingProgress(console) as progress:
                if prompts is not None:
                    _answer(spec, options, answers, answered_at, progress)
                features = gather_features(spec, layers, answers, out, progress, console.print)
        with ray_session(), TrainingProgress(console) as progress:
            model, models = train(kind, features, settings, rates, out, options.threads, [progress])
        show(console, [report(model)])
        with console.status("writing to MLflow"):
            log_training(kind, spec, params, model, models)
    return model


def _check_temperatures(kind: TrainedKind, temperatures: tuple[float, ...], where: str) -> None:
    """Raises :class:`UserError` where no answer has a temperature at which the kind is judged."""
    if kind.judged_at and not set(kind.judged_at) & set(temperatures):
        needed = " or ".join(f"{temperature:g}" for temperature in kind.judged_at)
        raise UserError(
            f"{where}: no answers at temperature {needed}, by which an {kind.title} is judged; have"
            " some of them"
        )


def _answer(
    spec: PairSpec,
    options: AnswerOptions,
    answers: Path,
    temperatures: tuple[float, ...],
    observer: Any,
) -> None:
    """Have the target answer the prompts that it has not answered."""
    from specdec_core.models.pair import check_pair
    from specdec_core.prompts.chat import AUTO
    from specdec_core.training.recorded.gather import gather_answers, token_prompts

    tokenizer = check_pair(spec)
    assert options.prompts is not None
    template = options.chat_template or AUTO
    found = token_prompts(
        options.prompts, tokenizer, options.limit, options.prompt_tokens, template
    )
    gather_answers(spec, found, answers, options.new_tokens, temperatures, SLOTS, observer)
