"""Distilling a draft with a reduced vocabulary from what its target computed of its answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specdec_core.base.files import atomic_folder
from specdec_core.models.reduced_draft.model import ReducedDraft
from specdec_core.models.reduced_draft.storing import Reduced, save_reduced
from specdec_core.training.recorded.features import TextBatch
from specdec_core.training.recorded.finished import TrainingCard
from specdec_core.training.recorded.loss import draft_loss, parts, probabilities
from specdec_core.training.recorded.training import RecordedTraining
from specdec_core.training.reduced_draft.settings import DraftEvaluation, DraftTrainingSettings
from specdec_core.training.reduced_draft.start import (
    ProjectedEmbedding,
    continued_draft,
    copied_draft,
    start_draft,
)


class DraftTrainingCard(TrainingCard):
    """How a draft was trained."""

    settings: DraftTrainingSettings
    best: DraftEvaluation
    curve: tuple[DraftEvaluation, ...]


class DraftTraining(RecordedTraining[DraftTrainingSettings, DraftEvaluation, ReducedDraft]):
    """Trains a draft to predict the target's distribution after each token of an answer; prompts
    are context."""

    name, title, command, workspace = "draft", "draft", "train draft", "drafts"
    card_type = DraftTrainingCard
    evaluation_type = DraftEvaluation
    reads_features = False

    def _start(
        self, config: PretrainedConfig, tables: Mapping[str, Tensor], proposable: Tensor
    ) -> ReducedDraft:
        if self.settings.copied_layers:
            name = self.texts.card.target
            return copied_draft(name, config, tables, proposable, self.settings)
        return start_draft(config, tables, proposable, self.settings)

    def _continued(
        self, name: str, config: PretrainedConfig, tables: Mapping[str, Tensor]
    ) -> ReducedDraft:
        return continued_draft(name, self.texts.card.target, tables)

    def _proposable(self, model: ReducedDraft) -> Tensor:
        tokens: Tensor = model.lm_head.tokens
        return tokens

    def loss(self, batch: TextBatch) -> Tensor:
        answered = batch.answered
        target = probabilities(batch.last[answered], batch.normaliser[answered], self.output)
        weight = self.model.lm_head.linear.weight
        states, places = self._states(batch), torch.arange(len(target), device=target.device)
        return draft_loss(self.settings.loss, states, weight, target, places) / len(target)

    def judge(self, batches: Iterable[TextBatch]) -> DraftEvaluation:
        agreed = overlap = count = 0.0
        for batch in batches:
            answered = batch.answered
            states, best = self._states(batch), batch.best[answered]
            last, normaliser = batch.last[answered], batch.normaliser[answered]
            count += len(states)
            for rows in parts(len(states), states.device):
                q = self.model.lm_head.linear(states[rows]).float().softmax(-1)
                p = probabilities(last[rows], normaliser[rows], self.output).float()
                tokens = self.model.lm_head.tokens[q.argmax(-1)]
                agreed += float((tokens == best[rows]).sum())
                overlap += float(torch.minimum(p, q).sum())
        return DraftEvaluation(agreement=agreed / count, overlap=overlap / count)

    def _states(self, batch: TextBatch) -> Tensor:
        """What the output layer reads after each token of the answers, (tokens, width)."""
        # Padding on the right is behind all that is read, and needs no mask.
        states = self.model.model(input_ids=batch.tokens[:, :-1], use_cache=False).last_hidden_state
        numbers = torch.arange(batch.chains, device=batch.prompts.device)
        places = batch.prompts[:, None] + numbers
        texts, numbers = batch.answered.nonzero(as_tuple=True)
        read: Tensor = states[texts, places[texts, numbers]]
        return read

    def save(self, folder: Path) -> None:
        draft, target = self.model, self.texts.card
        embedding, projection = draft.model.embed_tokens, None
        if isinstance(embedding, ProjectedEmbedding):
            projection = embedding.projection.weight
        reduced = Reduced(
            draft_vocab_size=len(draft.lm_head.tokens),
            projected=projection is not None,
            target=target.target,
            target_fingerprint=target.fingerprint,
            target_width=self.output.shape[1],
        )
        card = DraftTrainingCard(**self.card_values)
        with atomic_folder(folder) as new:
            save_reduced(draft, projection, reduced, new)
            card.save(new)
