"""What the commands that train on a target's answers share: their options, and how they go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.console import console, interruptible
from jobs.options import chosen_pair, numbers
from specdec_core.base.errors import UserError
from specdec_core.base.files import locked
from specdec_core.base.workspace import workspace

if TYPE_CHECKING:
    from dashboards.sections import Section
    from specdec_core.config import PairSpec
    from specdec_core.training.kinds import TrainedKind
    from specdec_core.training.recorded.finished import Finished
    from specdec_core.training.recorded.settings import TrainingSettings

TrainedFor = Annotated[
    str,
    Option(help="Target model: hub id, folder, GGUF file, package:<name> or bundled:<name>."),
]
AnsweredPrompts = Annotated[
    str | None,
    Option(
        help="Prompts to answer: JSONL file, hub data set or bundled:<name>; unset, the answers"
        " that are there."
    ),
]
PromptTokens = Annotated[int, Option(min=1, help="Prompts of more tokens are left out.")]
AnswersFolder = Annotated[
    Path | None, Option(help="Folder of answers; unset, `answers` beside what is trained.")
]
AnswerTokens = Annotated[int, Option(min=2, help="The longest answer.")]
Temperatures = Annotated[str, Option(help="Prompts are answered at, in turn.")]
AnswerSlots = Annotated[int, Option(min=1, help="Prompts that are answered at a time.")]
BatchTokens = Annotated[int | None, Option(help="Tokens of answers of a step; unset, 512.")]
Epochs = Annotated[int | None, Option(help="Passes over the answers; unset, 3.")]
Minutes = Annotated[
    float | None,
    Option(help="Train for so long instead; the schedule is fitted to it; unset, --epochs."),
]
TrainingThreads = Annotated[int, Option(min=1, help="Of the target, and of each training.")]
Seed = Annotated[int, Option(help="Of weights and order.")]
Further = Annotated[
    bool, Option("--further", help="Train what the folder holds further, with a new schedule.")
]
Out = Annotated[
    Path | None, Option(help="Folder; unset, one of the target's name in the workspace.")
]


@dataclass(frozen=True)
class Answering:
    """The prompts that a target answers, if any, and how."""

    folder: Path | None
    prompts: str | None
    limit: int | None
    chat_template: str | None
    prompt_tokens: int
    new_tokens: int
    temperatures: str
    slots: int
    max_length: int | None


def train_on_answers(
    kind: TrainedKind,
    target: str,
    answering: Answering,
    layers: tuple[int, ...] | None,
    features: Path | None,
    settings: Sequence[TrainingSettings],
    out: Path | None,
    threads: int,
    report: Callable[[Finished[Any]], Section],
    further: bool = False,
) -> Finished[Any]:
    """Have the target answer what it has not answered, record what is not recorded, train with each
    of the `settings`, which differ in the learning rate, and keep the best.

    `layers` are those that features are recorded of, None for the usual ones; `features`, a folder,
    is read instead of recording any. `further` begins with the model that `out` holds.

    Raises:
        UserError: bad input, by name.
    """
    from cluster.recorded_training import train
    from cluster.session import ray_session
    from dashboards.outputs.console import show
    from dashboards.progress import TrainingProgress
    from dashboards.reports.learning import learning
    from dashboards.tracking.training_run import TrainingRun
    from specdec_core.config import PairSpec, RunnerSettings
    from specdec_core.training.recorded.answers import read_card
    from specdec_core.training.recorded.features import check_features
    from specdec_core.training.recorded.finished import load_card

    temperatures = numbers(answering.temperatures, "--temperatures", float)
    runner = RunnerSettings(device="cpu", threads=threads)
    spec = PairSpec(target=target, drafts={}, runner=runner)
    spec = chosen_pair(spec, None, None, answering.max_length)
    name = spec.name.removeprefix("bundled-")
    out = (out or workspace() / kind.workspace / name).absolute()
    answers = (answering.folder or out / "answers").absolute()
    if features is not None:
        check_features(features, target)
    elif answering.prompts is None and not (answers / "answers.json").exists():
        raise UserError(f"{answers}: no answers in it; give --prompts to have some written")
    elif answering.prompts is None:
        _check_temperatures(kind, read_card(answers).temperatures, str(answers))
    else:
        _check_temperatures(kind, temperatures, f"--temperatures {answering.temperatures}")
    rates = [own.learning_rate for own in settings]
    params = {
        "target": target,
        "answers": str(answers),
        "prompts": answering.prompts,
        "settings": settings[-1].model_dump(mode="json", exclude={"learning_rate"}),
        "learning_rates": rates,
        "out": str(out),
        **({"features": str(features)} if features else {}),
        # What it begins with: each time that a model is trained further is a run of its own.
        **({"further": load_card(out / kind.name, kind.card).training} if further else {}),
    }
    with interruptible(), locked(out, "training"):
        if features is None:
            features = _gathered(spec, answering, temperatures, answers, layers, out)
        with ray_session(), TrainingRun(kind, spec, params) as tracking:
            with TrainingProgress(console) as progress:
                observers = [tracking, progress]
                model = train(kind, features, settings[-1], rates, out, threads, observers, further)
            show(console, [report(model), learning(model)])
            with console.status("writing to MLflow"):
                tracking.finish(model)
    return model


def _check_temperatures(kind: TrainedKind, temperatures: tuple[float, ...], where: str) -> None:
    """Raises :class:`UserError` where answers at these temperatures say nothing of a model."""
    if kind.judged_at and not set(kind.judged_at) & set(temperatures):
        needed = " or ".join(f"{temperature:g}" for temperature in kind.judged_at)
        raise UserError(
            f"{where}: no answers at temperature {needed}, by which an {kind.title} is judged; have"
            " some of them"
        )


def _gathered(
    spec: PairSpec,
    answering: Answering,
    temperatures: tuple[float, ...],
    answers: Path,
    layers: tuple[int, ...] | None,
    out: Path,
) -> Path:
    """The folder of the features of all answers."""
    from dashboards.progress import TrainingProgress
    from specdec_core.models.pair import check_pair
    from specdec_core.prompts.chat import AUTO
    from specdec_core.training.recorded.gather import gather_answers, gather_features
    from specdec_core.training.recorded.prompts import token_prompts

    with TrainingProgress(console) as progress:
        if answering.prompts is not None:
            found = token_prompts(
                answering.prompts,
                check_pair(spec),
                answering.limit,
                answering.prompt_tokens,
                answering.chat_template or AUTO,
            )
            gather_answers(
                spec, found, answers, answering.new_tokens, temperatures, answering.slots, progress
            )
        return gather_features(spec, layers, answers, out, progress, console.print)
