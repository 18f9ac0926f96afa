"""The part that `specdec train eagle` and `specdec train draft` share: both train a model on
recorded answers of its target."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from jobs.console import console, interruptible
from specdec_core.base.errors import UserError
from specdec_core.base.files import locked
from specdec_core.base.workspace import workspace

if TYPE_CHECKING:
    from dashboards.progress import TrainingProgress
    from dashboards.sections import Section
    from specdec_core.training.recorded.finished import TrainingCard
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
TrainingThreads = Annotated[
    int | None, Option(min=1, help="CPU threads; unset, as torch takes: one for each core.")
]
Start = Annotated[
    str | None,
    Option(
        "--from",
        help="Trained model that the training begins with: a folder, hub id or bundled:<name>;"
        " unset, it begins with weights of the target.",
    ),
]
Out = Annotated[
    Path | None, Option(help="Folder; unset, one of the target's name in the workspace.")
]


def train_on_answers(
    kind: type[RecordedTraining[Any, Any, Any]],
    recordings: Sequence[str],
    prompt_tokens: int,
    layers: Callable[[str], tuple[int, ...] | None],
    settings: TrainingSettings,
    threads: int | None,
    out: Path | None,
    report: Callable[[Any], Section],
) -> Path:
    """Record the target's features of its recorded answers, and train a model on them; returns the
    model's folder. Features on disk are not recorded again. The inputs of a target's `layers` are
    recorded; None stands for the usual ones. `report` shows the model's card.

    Raises:
        UserError: bad input, by name.
    """
    import torch

    from dashboards.outputs.console import show
    from dashboards.progress import TrainingProgress
    from dashboards.tracking.training_run import log_training
    from specdec_core.config import PairSpec
    from specdec_core.recordings.find import open_named
    from specdec_core.training.recorded.features import RecordedAnswers
    from specdec_core.training.recorded.gather import gather_features

    threads = threads or torch.get_num_threads()
    opened = [open_named(name, workspace()) for name in recordings]
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
        "out": str(out),
    }
    folder = out / kind.name
    if folder.exists() and not (folder / kind.card_type.FILE).exists():
        raise UserError(f"{folder}: holds something else than a trained model; name another --out")
    with interruptible(), locked(out, "training"):
        with TrainingProgress(console) as progress:
            features = gather_features(answers, read, threads, out, progress, console.print)
            card = _train(kind, features, settings, threads, out, progress)
        show(console, [report(card)])
        with console.status("writing to MLflow"):
            log_training(kind, spec, params, card, out / kind.name)
    return out / kind.name


def _train(
    kind: type[RecordedTraining[Any, Any, Any]],
    features: Path,
    settings: TrainingSettings,
    threads: int,
    out: Path,
    progress: TrainingProgress,
) -> TrainingCard:
    """Train a model on the features in a folder, from its last checkpoint if it has one, into
    `out`; a model of this very training that is there is not trained again. Returns its card."""
    import torch

    from specdec_core.base.files import needs_room
    from specdec_core.training.recorded.features import RecordedTexts
    from specdec_core.training.recorded.finished import finished_in, training_digest

    texts, folder = RecordedTexts(features), out / kind.name
    digest = training_digest(texts, settings)
    card = finished_in(folder, digest, kind.card_type)
    progress.stage("training", 100, done=0 if card is None else 100)
    if card is not None:
        return card
    torch.set_num_threads(threads)
    training, checkpoints = kind(texts, settings), out / ".training" / digest[:10]
    with needs_room(out):
        training.run(checkpoints, progress.advanced)
        training.model.cpu()
        training.save(folder)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return kind.card_type.load(folder)
