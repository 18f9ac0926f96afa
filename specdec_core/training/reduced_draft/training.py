"""Distilling a draft with a reduced vocabulary from what its target computed of its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from specdec_core.base.files import atomic_folder
from specdec_core.models.reduced_draft import ReducedDraft
from specdec_core.models.reduced_draft.storing import Reduced, save_reduced
from specdec_core.training.recorded.batch import TextBatch
from specdec_core.training.recorded.features import RecordedTexts
from specdec_core.training.recorded.finished import CARD, TrainingCard, card_values
from specdec_core.training.recorded.loss import cross_entropy, probabilities
from specdec_core.training.recorded.training import RecordedTraining
from specdec_core.training.reduced_draft.copied import copied_draft
from specdec_core.training.reduced_draft.settings import DraftEvaluation, DraftTrainingSettings
from specdec_core.training.reduced_draft.start import ProjectedEmbedding, start_draft

_ROWS = 64


class DraftTrainingCard(TrainingCard):
    """How a draft was trained."""

    settings: DraftTrainingSettings
    best: DraftEvaluation
    curve: tuple[DraftEvaluation, ...]

    @property
    def limit(self) -> float:
        return self.coverage

    def learned(self, evaluation: DraftEvaluation) -> dict[str, float]:
        return {"best tokens agree": evaluation.agreement, "Σ min(p, q)": evaluation.overlap}


class DraftTraining(RecordedTraining[DraftTrainingSettings, DraftEvaluation, ReducedDraft]):
    """Trains a draft to predict the target's distribution after each token of an answer; prompts
    are context."""

    evaluation_type = DraftEvaluation
    reads_features = False

    def __init__(
        self, texts: RecordedTexts, settings: DraftTrainingSettings, checkpoint: Path
    ) -> None:
        super().__init__(texts, settings, settings.draft_vocab_size, checkpoint)

    def _start(
        self, config: PretrainedConfig, tables: Mapping[str, Tensor], proposable: Tensor
    ) -> ReducedDraft:
        if self.settings.copied_layers:
            name = self.texts.card.target
            return copied_draft(name, config, tables, proposable, self.settings)
        return start_draft(config, tables, proposable, self.settings)

    def _loss(self, batch: TextBatch, generator: torch.Generator) -> Tensor:
        answered = batch.answered
        target = probabilities(batch.last[answered], batch.normaliser[answered], self.output)
        weight = self.model.lm_head.linear.weight
        states, places = self._states(batch), torch.arange(len(target))
        return cross_entropy(states, weight, target, places) / len(target)

    def _judge(self, batches: Iterator[TextBatch]) -> dict[str, Any]:
        agreed = overlap = count = 0.0
        for batch in batches:
            answered = batch.answered
            states, best = self._states(batch), batch.best[answered]
            last, normaliser = batch.last[answered], batch.normaliser[answered]
            count += len(states)
            for first in range(0, len(states), _ROWS):
                rows = slice(first, first + _ROWS)
                q = self.model.lm_head.linear(states[rows]).float().softmax(-1)
                p = probabilities(last[rows], normaliser[rows], self.output).float()
                tokens = self.model.lm_head.tokens[q.argmax(-1)]
                agreed += float((tokens == best[rows]).sum())
                overlap += float(torch.minimum(p, q).sum())
        return {"agreement": agreed / count, "overlap": overlap / count}

    def _states(self, batch: TextBatch) -> Tensor:
        """What the output layer reads after each token of the answers, (tokens, width)."""
        # Padding on the right is behind all that is read, and needs no mask.
        states = self.model.model(input_ids=batch.tokens[:, :-1], use_cache=False).last_hidden_state
        places = batch.prompts[:, None] + torch.arange(batch.chains)
        texts, numbers = batch.answered.nonzero(as_tuple=True)
        read: Tensor = states[texts, places[texts, numbers]]
        return read

    def save(self, folder: Path) -> None:
        draft, target, settings = self.finished(), self.texts.card, self.settings
        embedding = draft.model.embed_tokens
        projection = (
            embedding.projection.weight if isinstance(embedding, ProjectedEmbedding) else None
        )
        reduced = Reduced(
            draft_vocab_size=len(draft.lm_head.tokens),
            embedding=settings.embedding,
            projected=projection is not None,
            output="target" if settings.copied_layers else "own",
            form=settings.form,
            target=target.target,
            target_fingerprint=target.fingerprint,
            target_width=self.output.shape[1],
        )
        card = DraftTrainingCard(**card_values(self))
        with atomic_folder(folder) as new:
            save_reduced(draft, projection, reduced, new)
            (new / CARD).write_text(card.model_dump_json(indent=1))
