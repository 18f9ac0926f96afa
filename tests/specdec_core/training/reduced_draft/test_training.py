"""Drafts learn what their target will write, and an interrupted training ends as another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec_core.models.pair import Pair, load_pair
from specdec_core.training.recorded.features import RecordedTexts
from specdec_core.training.recorded.finished import load_card
from specdec_core.training.reduced_draft.settings import DraftTrainingSettings
from specdec_core.training.reduced_draft.training import DraftTraining, DraftTrainingCard
from tests.specdec_core.training.conftest import Recorded

SETTINGS = DraftTrainingSettings(
    draft_vocab_size=200,
    width=24,
    layers=1,
    inner=48,
    heads=2,
    key_value_heads=1,
    learning_rate=1e-2,
    batch_tokens=200,
    epochs=6,
    evaluations=3,
)


def run(training: DraftTraining) -> DraftTraining:
    while not training.done:
        training.advance(60)
    return training


@pytest.mark.parametrize("embedding", ["target", "own"])
def test_a_draft_learns_what_its_target_will_write(
    recorded: Recorded, tiny_pair: Pair, tmp_path: Path, embedding: str
) -> None:
    settings = SETTINGS.model_copy(update={"embedding": embedding})
    untrained = DraftTraining(recorded.texts, settings, tmp_path / "untrained.pt")
    before = untrained._evaluate()
    training = run(DraftTraining(recorded.texts, settings, tmp_path / "checkpoint.pt"))
    best = max(training.curve, key=lambda evaluation: evaluation.score)
    assert best.agreement > before.agreement + 0.1
    assert best.overlap > before.overlap + 0.05
    assert training.curve[-1].loss < training.curve[0].loss

    training.save(tmp_path / "draft")
    card = load_card(tmp_path / "draft", DraftTrainingCard)
    assert card.best == best
    drafts = {"d": str(tmp_path / "draft")}
    pair = load_pair(tiny_pair.spec.model_copy(update={"drafts": drafts}))
    assert measured(pair, recorded.texts, training.held_out) == pytest.approx(
        best.agreement, abs=0.02
    )


@torch.no_grad()
def measured(pair: Pair, texts: RecordedTexts, numbers: list[int]) -> float:
    """How often the loaded draft's best token is the target's."""
    batch = texts.batch(numbers, features=False)
    logits = pair.draft_models["d"](input_ids=batch.tokens, use_cache=False).logits
    agreed = []
    for row, prompt, length in zip(
        range(len(numbers)), batch.prompts.tolist(), batch.lengths.tolist(), strict=True
    ):
        found = logits[row, prompt : prompt + length].argmax(-1)
        agreed.append(found == batch.best[row, :length])
    return float(torch.cat(agreed).float().mean())


def test_an_interrupted_training_ends_with_the_same_weights(
    recorded: Recorded, tmp_path: Path
) -> None:
    settings = SETTINGS.model_copy(update={"epochs": 2, "evaluations": 2})
    whole = run(DraftTraining(recorded.texts, settings, tmp_path / "whole.pt"))
    done = False
    while not done:  # every process takes one step
        part = DraftTraining(recorded.texts, settings, tmp_path / "parts.pt")
        part.advance(1e-9)
        done = part.done
    assert (part.tokens, part.curve) == (whole.tokens, whole.curve)
    for name, weight in whole.finished().state_dict().items():
        torch.testing.assert_close(part.finished().state_dict()[name], weight, rtol=0, atol=0)
