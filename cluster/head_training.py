"""Acceptance heads trained in parallel: every kind, depth and weight of a grid.

A head that is in the output folder with the digest of this training is not trained again. The
examples are in Ray's object store, once for all trainings of a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
import torch

from cluster.parallel import in_parallel
from cluster.session import ray_session, resources
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer, together
from specdec_core.drafting.heads.card import HeadCard, HeadSpec, HeadTrainingSettings
from specdec_core.drafting.heads.modules import HeadKind
from specdec_core.drafting.heads.storage import WEIGHTS, load_card, save_head
from specdec_core.training.finished import Finished
from specdec_core.training.heads.examples import Examples, training_digest
from specdec_core.training.heads.training import HeadTraining, TrainedHead

FinishedHead = Finished[HeadCard]


@dataclass(frozen=True)
class _Entry:
    """A training: one head with one learning rate."""

    name: str
    folder: Path
    spec: HeadSpec
    settings: HeadTrainingSettings
    digest: str

    def finished(self, label: str) -> FinishedHead | None:
        """The head in the folder, if this very training made it."""
        try:
            card = load_card(self.folder)
        except UserError:
            return None
        return Finished(label, self.folder, card) if card.training == self.digest else None


def train_head(
    spec: HeadSpec, examples: Examples, settings: HeadTrainingSettings, device: str
) -> Iterator[TrainedHead]:
    """Train one head."""
    torch.set_num_threads(1)
    yield HeadTraining(spec, examples, settings, device).run()


def train_heads(
    specs: Sequence[HeadSpec],
    examples: Mapping[HeadKind, Examples],
    settings: HeadTrainingSettings,
    out: Path,
    learning_rates: Sequence[float] = (),
    observers: Sequence[Observer] = (),
    device: str = "auto",
) -> tuple[list[FinishedHead], list[FinishedHead]]:
    """Train every head of `specs` on its kind's examples, into `<out>/<name>`. Returns the heads in
    the order of `specs`, and all that were trained for them.

    With several `learning_rates` every head is trained with each, in `<out>/.search`, and the one
    with the least loss on the dev prompts becomes `<out>/<name>`.
    """
    entries = _entries(specs, examples, settings, learning_rates, out)
    observer = together(Observer, observers)
    heads = {e: head for e, entry in entries.items() if (head := entry.finished(e)) is not None}
    observer.stage("training heads", len(entries), done=len(heads))
    failures: dict[str, str] = {}
    with ray_session():
        if device == "auto":
            device = "cuda" if resources(1, device)["GPU"] else "cpu"
        stored = {kind: ray.put(of_kind) for kind, of_kind in examples.items()}
        pending = [(label, entry) for label, entry in entries.items() if label not in heads]
        # The longest first, so that none is left over for one process at the end.
        pending.sort(key=lambda e: (e[1].spec.kind, e[1].spec.depth), reverse=True)
        calls = {e: (t.spec, stored[t.spec.kind], t.settings, device) for e, t in pending}
        for label, trained in in_parallel(train_head, calls, 1, device, failures.__setitem__):
            folder = entries[label].folder
            card = save_head(trained.weights, trained.card, folder)
            heads[label] = Finished(label, folder, card)
            observer.step()
    for label, reason in failures.items():
        observer.warned(f"{label} failed: {reason}")
    if not heads:
        raise RuntimeError(f"no head could be trained: {failures}")
    best: dict[str, FinishedHead] = {}
    for label, entry in entries.items():
        if label in heads:
            known = [best[entry.name]] if entry.name in best else []
            best[entry.name] = min([*known, heads[label]], key=_loss)
    tried = [heads[label] for label in entries if label in heads]
    return [_named(name, head, out) for name, head in best.items()], tried


def _loss(head: FinishedHead) -> float:
    return head.card.metrics["eval_loss"]


def _named(name: str, head: FinishedHead, out: Path) -> FinishedHead:
    """The best head of a search, under the name of the head."""
    if head.label == name:
        return head
    weights = (head.folder / WEIGHTS).read_bytes()
    return Finished(name, out / name, save_head(weights, head.card, out / name))


def head_name(spec: HeadSpec, examples: Examples) -> str:
    """`small-specdecpp-d3-w6`; sampled recordings name their temperature after the draft."""
    sampling = examples.sampling
    tempered = "" if sampling.greedy else f"-T{sampling.temperature:g}"
    return f"{examples.draft}{tempered}-{spec.label}"


def _entries(
    specs: Sequence[HeadSpec],
    examples: Mapping[HeadKind, Examples],
    settings: HeadTrainingSettings,
    learning_rates: Sequence[float],
    out: Path,
) -> dict[str, _Entry]:
    """Every head with every learning rate, by label."""
    entries = {}
    for spec in specs:
        name = head_name(spec, examples[spec.kind])
        for rate in learning_rates or [settings.learning_rate]:
            own = settings.model_copy(update={"learning_rate": rate})
            search = len(learning_rates) > 1
            label = f"{name}-lr{rate:g}" if search else name
            folder = out / ".search" / label if search else out / name
            digest = training_digest(spec, examples[spec.kind], own)
            entries[label] = _Entry(name, folder, spec, own, digest)
    return entries
