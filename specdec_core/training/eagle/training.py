"""Training an EAGLE-3 head on recorded features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from specdec_core.base.files import atomic_folder
from specdec_core.models.eagle import EagleHead, EagleSettings
from specdec_core.models.eagle.formats.speculators import EagleCard
from specdec_core.models.eagle.loading import save_head
from specdec_core.training.eagle.acceptance import AcceptanceCounts
from specdec_core.training.eagle.settings import EagleEvaluation, EagleTrainingSettings
from specdec_core.training.eagle.start import continued_head, start_head
from specdec_core.training.eagle.unrolled import UnrolledStep, unroll
from specdec_core.training.recorded.features import TextBatch, read_tables
from specdec_core.training.recorded.finished import TrainingCard
from specdec_core.training.recorded.loss import draft_loss, probabilities
from specdec_core.training.recorded.training import RecordedTraining


class EagleTrainingCard(TrainingCard):
    """How a head was trained."""

    settings: EagleTrainingSettings
    head: EagleSettings
    best: EagleEvaluation
    curve: tuple[EagleEvaluation, ...]


class EagleTraining(RecordedTraining[EagleTrainingSettings, EagleEvaluation, EagleHead]):
    """Trains a head by the training-time test of EAGLE-3."""

    name, title, command, workspace = "head", "EAGLE head", "train eagle", "eagle"
    judged_at = (0.0, 1.0)
    card_type = EagleTrainingCard
    evaluation_type = EagleEvaluation
    reads_features = True

    def _start(
        self, config: PretrainedConfig, tables: Mapping[str, Tensor], proposable: Tensor
    ) -> EagleHead:
        shape = EagleSettings.for_target(
            config, len(proposable), feature_layers=self.texts.card.layers
        )
        return start_head(shape, tables, proposable, self.settings.seed)

    def _continued(
        self, name: str, config: PretrainedConfig, tables: Mapping[str, Tensor]
    ) -> EagleHead:
        return continued_head(name, config, self.texts.card, tables)

    def _proposable(self, model: EagleHead) -> Tensor:
        return model.proposable

    def loss(self, batch: TextBatch) -> Tensor:
        """The mean over chains of the sum over steps."""
        steps = self._unrolled(batch, self.settings.share)
        answered = batch.answered
        target = probabilities(batch.last[answered], batch.normaliser[answered], self.output)
        first = batch.lengths.cumsum(0) - batch.lengths
        states = self.model.norm(torch.cat([step.states for step in steps]))
        places = torch.cat([first[step.texts] + step.positions for step in steps])
        weight, kind = self.model.lm_head.weight, self.settings.loss
        return draft_loss(kind, states, weight, target, places) / len(target)

    def judge(self, batches: Iterable[TextBatch]) -> EagleEvaluation:
        counts = AcceptanceCounts(self.settings.steps)
        for batch in batches:
            counts.add(self.model, batch, self._unrolled(batch), self.output)
        return EagleEvaluation(acceptance=counts.result())

    def save(self, folder: Path) -> None:
        target = self.texts.card
        facts = EagleCard(
            target=target.target,
            target_architectures=tuple(target.config.get("architectures") or ()),
            target_fingerprint=target.fingerprint,
            speculative_tokens=self.settings.steps,
            training=self.settings.model_dump(mode="json"),
        )
        card = EagleTrainingCard(**self.card_values, head=self.model.settings)
        with atomic_folder(folder) as new:
            save_head(self.model, new, facts, embedding=self._has_own_embedding)
            card.save(new)

    @property
    def _has_own_embedding(self) -> bool:
        own, given = self.model.embed_tokens, read_tables(self.texts.folder)["embed_tokens"]
        assert isinstance(own, nn.Embedding)
        return not torch.equal(own.weight.to("cpu", given.dtype), given)

    def _unrolled(self, batch: TextBatch, share: float = 1.0) -> list[UnrolledStep]:
        typed = replace(batch, features=batch.features.to(self.type))
        return unroll(self.model, typed, self.settings.steps, share)
