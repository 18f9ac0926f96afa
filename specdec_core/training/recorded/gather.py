"""What trainings read, made where it is missing: a target's features of its recorded answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specdec_core.base.observer import Observer
from specdec_core.config import PairSpec, RunnerSettings
from specdec_core.models.eagle.settings import default_layers
from specdec_core.models.loading import load_skeleton
from specdec_core.models.pair import load_pair
from specdec_core.training.recorded.features import (
    RecordedAnswers,
    check_folder,
    missing_bytes,
    record_features,
)
from specdec_core.training.recorded.loss import working_device, working_type


def gather_features(
    answers: RecordedAnswers,
    layers: tuple[int, ...] | None,
    threads: int,
    out: Path,
    observer: Observer,
    say: Callable[[str], None],
) -> Path:
    """Record the target's features of the answers that have none yet, after saying how much room
    they take; returns the features' folder, in `out`. With no `layers` only what the output layer
    reads is recorded; None is for the three that heads read by default.

    Raises:
        UserError: `out` holds features of other answers.
    """
    config = load_skeleton(answers.target).config.get_text_config(decoder=True)
    layers = default_layers(config.num_hidden_layers) if layers is None else layers
    folder = out / "features" / ("-".join(map(str, layers)) or "output")
    check_folder(folder, answers, layers)
    if room := missing_bytes(answers, folder, len(layers), config.hidden_size):
        say(f"features will take {room / 1e9:.2f} GB in {folder}")
        # A forward of many tokens is quickest with weights as they are.
        device = working_device()
        narrow = str(working_type(device)).removeprefix("torch.")
        runner = RunnerSettings(
            device=device.type, threads=threads, pack=False, target_dtype=narrow
        )
        pair = load_pair(PairSpec(target=answers.target, drafts={}, runner=runner))
        record_features(pair, layers, answers, folder, observer)
    return folder
