"""Drafts learn what their target will write."""

import math
from shutil import copytree
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from specdec_core.base.bundled import bundled_path
from specdec_core.base.errors import UserError
from specdec_core.models.loading import load_config
from specdec_core.models.pair import load_pair
from specdec_core.training.recorded.features import read_tables
from specdec_core.training.reduced_draft.settings import DraftTrainingSettings
from specdec_core.training.reduced_draft.start import copied_draft
from specdec_core.training.reduced_draft.training import DraftTraining, DraftTrainingCard
from tests.specdec_core.training.conftest import evaluated

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

COPY = DraftTrainingSettings(
    draft_vocab_size=200,
    copied_layers=(0,),
    learning_rate=3e-3,
    batch_tokens=200,
    epochs=3,
    evaluations=3,
)


ACCEPTING = SETTINGS.model_copy(update={"loss": "acceptance"})


@pytest.mark.parametrize(
    "settings", [SETTINGS, COPY, ACCEPTING], ids=["projected", "copied", "for acceptance"]
)
def test_a_draft_learns_what_its_target_will_write(
    recorded, tiny_pair, tmp_path, settings, monkeypatch
):
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr("specdec_core.training.trainer.time", clock)
    training = DraftTraining(recorded.texts, settings)
    before = evaluated(training)
    training.run(tmp_path / "checkpoints")
    best = max(training.curve, key=lambda evaluation: evaluation.score)
    more = 0.03 if settings.copied_layers else 0.1  # which knows something when it begins
    assert best.agreement > before.agreement + more
    assert best.overlap > before.overlap + more / 2
    assert training.curve[-1].loss < training.curve[0].loss

    training.save(tmp_path / "draft")
    card = DraftTrainingCard.load(tmp_path / "draft")
    assert card.best == best
    drafts = {"d": str(tmp_path / "draft")}
    pair = load_pair(tiny_pair.spec.model_copy(update={"drafts": drafts}))
    assert measured(pair, recorded.texts, training.held_out) == pytest.approx(
        best.agreement, abs=0.02
    )

    further = DraftTraining(recorded.texts, DraftTrainingSettings(start=drafts["d"]))
    assert evaluated(further).agreement == pytest.approx(best.agreement, abs=0.02)
    assert trained_in(further) == trained_in(training)


def test_the_loss_is_the_one_that_was_asked_for(recorded):
    losses = []
    for settings in (SETTINGS, ACCEPTING):
        training = DraftTraining(recorded.texts, settings)
        [batch] = training._batches([0])
        with torch.autocast(training.device.type, dtype=training.type):
            losses.append(training.loss(batch).item())
    assert 0 < losses[1] < losses[0]


def test_the_card_of_a_training_that_diverged_is_read_again(tmp_path):
    card = DraftTrainingCard.load(bundled_path("smollm2-draft"))
    last = card.curve[-1].model_copy(update={"loss": math.nan})
    diverged = card.model_copy(update={"curve": (*card.curve[:-1], last)})
    diverged.save(tmp_path)
    losses = [evaluation.loss for evaluation in DraftTrainingCard.load(tmp_path).curve]
    assert losses[:-1] == [evaluation.loss for evaluation in card.curve[:-1]]
    assert math.isnan(losses[-1])


@torch.no_grad()
def measured(pair, texts, numbers):
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


def test_a_draft_of_all_layers_begins_as_its_target(recorded):
    settings = COPY.model_copy(update={"copied_layers": (0, 1), "draft_vocab_size": 10**6})
    training = DraftTraining(recorded.texts, settings)
    assert evaluated(training).overlap > 0.98  # in bfloat16
    assert {name.split(".")[1] for name in trained_in(training)} == {"layers", "norm"}
    mixed = COPY.model_copy(update={"copied_layers": (1, 0), "draft_vocab_size": 10**6})
    other = DraftTraining(recorded.texts, mixed)
    assert evaluated(other).overlap < 0.9


def trained_in(training):
    return {name for name, p in training.model.named_parameters() if p.requires_grad}


def test_a_draft_that_cannot_be_trained_further_is_refused(recorded):
    with pytest.raises(UserError, match="no draft with a reduced vocabulary, which alone is"):
        DraftTraining(recorded.texts, DraftTrainingSettings(start="bundled:draft-small"))
    with pytest.raises(UserError, match="was trained for another target"):
        DraftTraining(recorded.texts, DraftTrainingSettings(start="bundled:smollm2-draft"))
    with pytest.raises(ValueError, match="copied_layers, heads: some has its own"):
        DraftTrainingSettings(start="some", copied_layers=(0,), heads=2)


def test_tables_that_models_compute_are_not_copied_and_quantised_layers_are_refused(
    recorded, tiny_spec, tmp_path
):
    target = copytree(tiny_spec.target, tmp_path / "target")
    file, layer = target / "model.safetensors", "model.layers.0.self_attn."
    tensors = load_file(file)
    old = {layer + "rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | old, file, metadata={"format": "pt"})
    config, tables = load_config(str(target)), read_tables(recorded.features)
    copied_draft(str(target), config, tables, torch.arange(9), COPY)
    scale = {layer + "q_proj.weight_scale": torch.ones(4)}
    save_file(tensors | scale, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"not the layers of a plain Llama: .*q_proj.weight_scale"):
        copied_draft(str(target), config, tables, torch.arange(9), COPY)


@pytest.mark.parametrize(
    ("kind", "layers", "complaint"),
    [
        ("llama", (0, 2), "has no decoder layer 2; it has 0 to 1"),
        ("qwen2", (0,), "a qwen2; a draft can begin as layers of Llama-like targets only"),
        ("mistral", (0,), "a mistral; a draft can begin as layers of Llama-like targets only"),
    ],
)
def test_layers_that_cannot_be_copied_are_refused_in_one_line(recorded, kind, layers, complaint):
    config = AutoConfig.for_model(kind, num_hidden_layers=2, sliding_window=8)
    tables = read_tables(recorded.features)
    settings = COPY.model_copy(update={"copied_layers": layers})
    with pytest.raises(UserError, match=complaint) as error:
        copied_draft("some", config, tables, torch.arange(9), settings)
    assert "\n" not in str(error.value)
