"""Heads trained in parallel: the grid of kinds, depths and weights as Ray Tune trials.

A head that is in the output folder with the digest of this training is finished and is not trained
again. The examples are in Ray's object store, once for all trials of a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ray import tune

from cluster.session import ray_session, resources
from cluster.training_trials import TrialRecord, run_trials
from specdec_core.base.errors import UserError
from specdec_core.base.observer import together
from specdec_core.drafting.heads.card import HeadCard, HeadSpec, HeadTrainingSettings
from specdec_core.drafting.heads.modules import HeadKind
from specdec_core.drafting.heads.storage import WEIGHTS, load_card, save_head
from specdec_core.training.heads.examples import Examples, training_digest
from specdec_core.training.heads.finished import FinishedHead, HeadObserver
from specdec_core.training.heads.training import HeadTraining

# Tune tries a lost trial again, but not one whose kept actor died before it began.
ATTEMPTS = 3


@dataclass(frozen=True)
class Entry:
    """A trial: one head with one learning rate."""

    label: str
    name: str
    folder: Path
    spec: HeadSpec
    settings: HeadTrainingSettings
    digest: str

    @property
    def config(self) -> dict[str, str]:
        """The trial's `config["entry"]`."""
        return {
            "label": self.label,
            "spec": self.spec.model_dump_json(),
            "settings": self.settings.model_dump_json(),
        }

    def finished(self) -> FinishedHead | None:
        """The head in the folder, if it is of this very training."""
        try:
            card = load_card(self.folder)
        except UserError:
            return None
        return FinishedHead(self.label, self.folder, card) if card.training == self.digest else None


class HeadTrial(tune.Trainable):
    """Trains the head that `config["entry"]` describes, an epoch a step; the last result holds
    it."""

    def setup(
        self,
        config: dict[str, Any],
        examples: Mapping[HeadKind, Examples] | None = None,
        device: str = "cpu",
    ) -> None:
        assert examples is not None
        torch.set_num_threads(1)
        self.examples, self.device = examples, device
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        entry = new_config["entry"]
        spec = HeadSpec.model_validate_json(entry["spec"])
        settings = HeadTrainingSettings.model_validate_json(entry["settings"])
        self.training = HeadTraining(spec, self.examples[spec.kind], settings, self.device)
        return True

    def step(self) -> dict[str, Any]:
        epoch = self.training.epoch()
        result: dict[str, Any] = {**epoch.model_dump(), "done": self.training.done}
        if self.training.done:
            trained = self.training.result()
            result |= {"card": trained.card.model_dump_json(), "weights": trained.weights}
        return result


def train_heads(
    specs: Sequence[HeadSpec],
    examples: Mapping[HeadKind, Examples],
    settings: HeadTrainingSettings,
    out: Path,
    learning_rates: Sequence[float] = (),
    observers: Sequence[HeadObserver] = (),
    device: str = "auto",
) -> list[FinishedHead]:
    """Train every head of `specs` on its kind's examples, into `<out>/<name>`; the heads in the
    order of `specs`.

    With several `learning_rates` every head is trained with each, in `<out>/.search`, and the one
    with the least loss on the dev prompts becomes `<out>/<name>`.
    """
    rates = tuple(learning_rates) or (settings.learning_rate,)
    entries = [
        _entry(spec, examples[spec.kind], settings, rate, out, search=len(rates) > 1)
        for spec in specs
        for rate in rates
    ]
    observer = together(HeadObserver, observers)
    done = {e.label: head for e in entries if (head := e.finished()) is not None}
    observer.stage("training heads", len(entries), done=len(done))
    for head in done.values():
        observer.head_finished(head)
    pending = {e.label: e for e in entries if e.label not in done}
    if pending:
        record = _HeadTrials(pending, done, observer)
        for _ in range(ATTEMPTS):
            if left := {label: e for label, e in pending.items() if label not in done}:
                _run(left, examples, device, record)
        for label in pending.keys() - done.keys():
            observer.warned(f"{label} failed: {record.why(label)}")
        if not done:
            raise RuntimeError(f"no head could be trained: {record.errors}")
    heads: dict[str, FinishedHead] = {}
    for entry in entries:
        head, best = done.get(entry.label), heads.get(entry.name)
        if head and (
            best is None or head.card.metrics["eval_loss"] < best.card.metrics["eval_loss"]
        ):
            heads[entry.name] = head
    return [_chosen(name, head, out) for name, head in heads.items()]


def _chosen(name: str, head: FinishedHead, out: Path) -> FinishedHead:
    """The best of a search, under the head's own name."""
    if head.label == name:
        return head
    weights = (head.folder / WEIGHTS).read_bytes()
    return FinishedHead(name, out / name, save_head(weights, head.card, out / name))


def head_name(spec: HeadSpec, examples: Examples) -> str:
    """`small-specdecpp-d3-w6`; sampled recordings name their temperature after the draft."""
    sampling = examples.sampling
    tempered = "" if sampling.greedy else f"-T{sampling.temperature:g}"
    return f"{examples.draft}{tempered}-{spec.label}"


def _entry(
    spec: HeadSpec,
    examples: Examples,
    settings: HeadTrainingSettings,
    learning_rate: float,
    out: Path,
    search: bool,
) -> Entry:
    settings = settings.model_copy(update={"learning_rate": learning_rate})
    name = head_name(spec, examples)
    label = f"{name}-lr{learning_rate:g}" if search else name
    folder = out / ".search" / label if search else out / name
    return Entry(label, name, folder, spec, settings, training_digest(spec, examples, settings))


def _run(
    pending: Mapping[str, Entry],
    examples: Mapping[HeadKind, Examples],
    device: str,
    record: _HeadTrials,
) -> None:
    with ray_session():  # which tells what devices there are
        needs = resources(1, device)
        if device == "auto":
            device = "cuda" if needs["GPU"] else "cpu"
        trial = tune.with_parameters(HeadTrial, examples=dict(examples), device=device)
        # The longest first, so that none is left over for one process at the end.
        longest = sorted(pending.values(), key=lambda e: (e.spec.kind, e.spec.depth), reverse=True)
        configs = [entry.config for entry in longest]
        run_trials(trial, needs, configs, record, metric="eval_loss", mode="min", reuse_actors=True)


class _HeadTrials(TrialRecord):
    """Saves each head as it finishes."""

    key = "entry"

    def __init__(
        self, pending: Mapping[str, Entry], done: dict[str, FinishedHead], observer: HeadObserver
    ) -> None:
        super().__init__()
        self.pending, self.done, self.observer = pending, done, observer

    def on_trial_result(
        self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        weights = result.pop("weights", None)
        if weights is None:
            return
        entry = self.pending[self.label(trial)]
        card = HeadCard.model_validate_json(result.pop("card"))
        card = save_head(weights, card, entry.folder)
        self.done[entry.label] = FinishedHead(entry.label, entry.folder, card)
        self.observer.head_finished(self.done[entry.label])
        self.observer.step()
