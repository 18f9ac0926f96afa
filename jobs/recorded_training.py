"""The part that `specdec train eagle` and `specdec train draft` share: both train a model on
recorded answers of its target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.console import console, interruptible
from specdec_core.base.errors import UserError
from specdec_core.base.files import locked
from specdec_core.base.workspace import workspace

if TYPE_CHECKING:
    from dashboards.sections import Section
    from specdec_core.training.finished import Finished
    from specdec_core.training.recorded.settings import TrainingSettings
    from specdec_core.training.recorded.training import RecordedTraining

Answers = Annotated[
    list[str],
    Option(help="Recording of the target's answers, a folder or a name; repeatable."),
]
PromptTokens = Annotated[int, Option(min=1, help="Prompts of more tokens are left out.")]
Minutes = Annotated[
    float | None,
    Option(help="Train for this time, with a schedule that fits it; unset, by the epochs."),
]
TrainingThreads = Annotated[int, Option(min=1, help="Of the target, and of each training.")]
Out = Annotated[
    Path | None, Option(help="Folder; unset, one of the target's name in the workspace.")
]


def train_on_answers(
    kind: type[RecordedTraining[Any, Any, Any]],
    recordings: Sequence[str],
    prompt_tokens: int,
    layers: Callable[[str], tuple[int, ...] | None],
    settings: TrainingSettings,
    rates: tuple[float, ...],
    threads: int,
    out: Path | None,
    report: Callable[[Finished[Any]], Section],
) -> Finished[Any]:
    """Record the target's features of its recorded answers, train with each of the learning rates
    and keep the best model. Features on disk are not recorded again. The inputs of a target's
    `layers` are recorded; None stands for the usual ones.

    Raises:
        UserError: bad input, by name.
    """
    from cluster.recorded_training import train
    from cluster.session import ray_session
    from dashboards.outputs.console import show
    from dashboards.progress import TrainingProgress
    from dashboards.tracking.training_run import log_training
    from specdec_core.config import PairSpec
    from specdec_core.recordings.find import finished, open_named
    from specdec_core.training.recorded.features import RecordedAnswers
    from specdec_core.training.recorded.gather import gather_features

    opened = [open_named(name, workspace()) for name in recordings]
    for each in opened:
        if not finished(each.folder):
            raise UserError(f"{each.folder}: not finished; the same `specdec record` resumes it")
    answers = RecordedAnswers(opened, prompt_tokens)
    temperatures = {each.header.sampling.temperature for each in answers.recordings}
    if kind.judged_at and not temperatures.intersection(kind.judged_at):
        needed = " or ".join(f"{temperature:g}" for temperature in kind.judged_at)
        raise UserError(
            f"{', '.join(recordings)}: no answers at temperature {needed}, by which an {kind.title}"
            " is judged; record some of them"
        )
    read = layers(answers.target)
    spec = PairSpec(target=answers.target, drafts={})
    name = spec.name.removeprefix("bundled-")
    out = (out or workspace() / kind.workspace / name).absolute()
    params = {
        "target": answers.target,
        "recordings": [str(each.folder) for each in answers.recordings],
        "settings": settings.model_dump(mode="json", exclude={"learning_rate"}),
        "learning_rates": list(rates),
        "out": str(out),
    }
    with interruptible(), locked(out, "training"):
        with TrainingProgress(console) as progress:
            features = gather_features(answers, read, threads, out, progress, console.print)
        with ray_session(), TrainingProgress(console) as progress:
            model, models = train(kind, features, settings, rates, out, threads, [progress])
        show(console, [report(model)])
        with console.status("writing to MLflow"):
            log_training(kind, spec, params, model, models)
    return model
