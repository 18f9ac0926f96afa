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
from ray.exceptions import RayError, RayTaskError

from cluster.session import ray_session, resources
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.drafting.heads.card import HeadSpec, HeadTrainingSettings
from specdec_core.drafting.heads.modules import HeadKind
from specdec_core.drafting.heads.storage import WEIGHTS, load_card, save_head
from specdec_core.training.heads.examples import Examples, training_digest
from specdec_core.training.heads.training import FinishedHead, HeadTraining, TrainedHead

RETRIES = 2  # of a training that is lost with its process or node


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
        return FinishedHead(label, self.folder, card) if card.training == self.digest else None


def train_head(
    spec: HeadSpec, examples: Examples, settings: HeadTrainingSettings, device: str
) -> TrainedHead:
    """Train one head."""
    torch.set_num_threads(1)
    return HeadTraining(spec, examples, settings, device).run()


def train_heads(
    specs: Sequence[HeadSpec],
    examples: Mapping[HeadKind, Examples],
    settings: Sequence[HeadTrainingSettings],
    out: Path,
    observer: Observer | None = None,
) -> tuple[list[FinishedHead], list[FinishedHead]]:
    """Train every head of `specs` on its kind's examples, into `<out>/<name>`. Returns the heads in
    the order of `specs`, and all that were trained for them.

    With several `settings`, which differ in the learning rate, every head is trained with each, in
    `<out>/.search`, and the one with the least loss on the dev prompts becomes `<out>/<name>`.

    Raises:
        UserError: a head of another pair is in one of the folders; no head could be trained.
    """
    observer = observer or Observer()
    entries = _entries(specs, examples, settings, out)
    heads = {e: head for e, entry in entries.items() if (head := entry.finished(e)) is not None}
    observer.stage("training heads", len(entries), done=len(heads))
    pending = {label: entry for label, entry in entries.items() if label not in heads}
    failures: dict[str, str] = {}
    for label, trained in _trained(pending, examples, failures):
        folder = entries[label].folder
        card = save_head(trained.weights, trained.card, folder)
        heads[label] = FinishedHead(label, folder, card)
        observer.step()
    for label, reason in failures.items():
        observer.warned(f"{label} failed: {reason}")
    if not heads:
        reasons = "; ".join(f"{label}: {reason}" for label, reason in failures.items())
        raise UserError(f"no head could be trained: {reasons}")
    tried = [heads[label] for label in entries if label in heads]
    best: dict[str, FinishedHead] = {}
    for head in sorted(tried, key=lambda head: head.card.metrics["eval_loss"]):
        best.setdefault(entries[head.label].name, head)
    names = dict.fromkeys(entries[head.label].name for head in tried)
    return [_named(name, best[name], out) for name in names], tried


def _trained(
    pending: Mapping[str, _Entry], examples: Mapping[HeadKind, Examples], failures: dict[str, str]
) -> Iterator[tuple[str, TrainedHead]]:
    """Train each entry in a process with one thread, or on a GPU where there is one; yields the
    heads by label as they are finished. Fills `failures` with the reasons."""
    if not pending:
        return
    with ray_session():
        needs = resources(1, "auto")
        task = ray.remote(
            num_cpus=needs["CPU"],
            num_gpus=needs["GPU"],
            max_retries=RETRIES,
            max_calls=0,  # the process is kept for the next call
        )(train_head)
        stored = {kind: ray.put(of_kind) for kind, of_kind in examples.items()}
        device = "cuda" if needs["GPU"] else "cpu"
        # The longest first, so that none is left over for one process at the end.
        longest = sorted(
            pending.items(), key=lambda e: (e[1].spec.kind, e[1].spec.depth), reverse=True
        )
        running = {
            task.remote(entry.spec, stored[entry.spec.kind], entry.settings, device): label
            for label, entry in longest
        }
        try:
            while running:
                done = ray.wait(list(running))[0][0]
                label = running.pop(done)
                try:
                    yield label, ray.get(done)
                except RayTaskError as error:
                    lines = str(error.cause).strip().splitlines()
                    failures[label] = lines[-1] if lines else type(error.cause).__name__
                except RayError:
                    failures[label] = "its worker was lost"
        finally:
            for reference in running:
                ray.cancel(reference)


def _named(name: str, head: FinishedHead, out: Path) -> FinishedHead:
    """The best head of a search, under the name of the head."""
    if head.label == name:
        return head
    weights = (head.folder / WEIGHTS).read_bytes()
    return FinishedHead(name, out / name, save_head(weights, head.card, out / name))


def head_name(spec: HeadSpec, examples: Examples) -> str:
    """`small-specdecpp-d3-w6`; sampled recordings name their temperature after the draft."""
    sampling = examples.sampling
    tempered = "" if sampling.greedy else f"-T{sampling.temperature:g}"
    return f"{examples.draft}{tempered}-{spec.label}"


def _entries(
    specs: Sequence[HeadSpec],
    examples: Mapping[HeadKind, Examples],
    settings: Sequence[HeadTrainingSettings],
    out: Path,
) -> dict[str, _Entry]:
    """Every head with every learning rate, by label."""
    entries = {}
    for spec in specs:
        name = head_name(spec, examples[spec.kind])
        _keep_other_pairs(out / name, examples[spec.kind])
        for own in settings:
            search = len(settings) > 1
            label = f"{name}-lr{own.learning_rate:g}" if search else name
            folder = out / ".search" / label if search else out / name
            digest = training_digest(spec, examples[spec.kind], own)
            entries[label] = _Entry(name, folder, spec, own, digest)
    return entries


def _keep_other_pairs(folder: Path, examples: Examples) -> None:
    """Raises :class:`UserError` where `folder` has a head of another pair: configurations may name
    it, and its name is the same where the draft has the same name."""
    try:
        card = load_card(folder)
    except UserError:
        return
    if card.pair != examples.pair:
        raise UserError(f"{folder}: has a head of another draft or target; name another --out")
