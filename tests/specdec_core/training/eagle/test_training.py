"""Heads learn from features that are recorded once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.models.pair import Pair
from specdec_core.training.eagle.settings import EagleTrainingSettings
from specdec_core.training.eagle.training import EagleTraining
from specdec_core.training.kinds import HEAD
from specdec_core.training.recorded.features import RecordedTexts, record_features
from specdec_core.training.recorded.gather import gather_features
from specdec_core.training.recorded.settings import Progress
from specdec_core.training.recorded.training import rate
from tests.specdec_core.training.conftest import LAYERS, Recorded, answer_prompts, unpacked

SETTINGS = EagleTrainingSettings(
    draft_vocab_size=200,
    steps=3,
    learning_rate=3e-3,
    batch_tokens=200,
    epochs=6,
    evaluations=3,
)


def test_a_head_learns_what_its_target_will_write(recorded: Recorded, tmp_path: Path) -> None:
    training = EagleTraining(recorded.texts, SETTINGS)
    before = training.evaluate().acceptance
    heard: list[Progress] = []
    training.run(tmp_path, heard.append)
    after = max(training.curve, key=lambda e: e.acceptance.length).acceptance
    assert training.evaluate().acceptance == after  # the best weights
    assert len(after.greedy) == len(after.sampled) == SETTINGS.steps
    assert after.greedy_length > before.greedy_length + 0.5
    assert after.sampled_length > before.sampled_length + 0.15
    assert after.greedy_tokens is not None
    assert before.greedy_tokens is not None
    assert 1 < before.greedy_tokens + 0.2 < after.greedy_tokens <= 1 + SETTINGS.steps
    assert training.curve[-1].loss < training.curve[0].loss
    evaluated = [progress for progress in heard if progress.summary]
    assert [progress.tokens for progress in evaluated] == [e.tokens for e in training.curve]
    assert evaluated[-1].figures == training.curve[-1].figures


def test_features_are_recorded_once_and_gone_on_with(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_core.training.recorded.answers.SHARD", 8)
    answers, features = tmp_path / "answers", tmp_path / "features"
    answer_prompts(tiny_pair, answers, prompts=20, new_tokens=6)
    pair = unpacked(tiny_pair)
    record_features(pair, LAYERS, answers, features)
    whole = {path.name: path.read_bytes() for path in features.glob("0*.safetensors")}
    assert len(whole) == 3
    (features / "00001.safetensors").unlink()
    kept = (features / "00000.safetensors").stat().st_mtime_ns
    record_features(pair, LAYERS, answers, features)
    assert (features / "00000.safetensors").stat().st_mtime_ns == kept
    assert {p.name: p.read_bytes() for p in features.glob("0*.safetensors")} == whole
    with pytest.raises(UserError, match="holds other features"):
        record_features(pair, (1,), answers, features)


def test_features_of_other_answers_are_not_taken_for_those_that_are_asked_for(
    tiny_pair: Pair, tmp_path: Path
) -> None:
    """Nor where there are as many shards of them, and nothing is missing."""

    def gathered(answers: str) -> Path:
        return gather_features(
            tiny_pair.spec, LAYERS, tmp_path / answers, tmp_path, Observer(), lambda line: None
        )

    for answers, prompts in (("one", 20), ("two", 21)):
        answer_prompts(tiny_pair, tmp_path / answers, prompts=prompts, new_tokens=4)
    features = gathered("one")
    assert gathered("one") == features
    with pytest.raises(
        UserError, match=r"of other answers than those in .*two; name another --out"
    ):
        gathered("two")
    card = json.loads((tmp_path / "two" / "answers.json").read_text())
    (tmp_path / "two" / "answers.json").write_text(json.dumps({**card, "fingerprint": "0"}))
    with pytest.raises(UserError, match="the answers of another target"):
        gathered("two")


def test_features_are_those_of_each_text_alone(tiny_pair: Pair, recorded: Recorded) -> None:
    texts = RecordedTexts(recorded.features)
    batch = texts.batch([3, 17, 40])
    for row, number in enumerate((3, 17, 40)):
        text = texts.texts[number]
        length = text.prompt + text.answer
        tokens = batch.tokens[row, :length]
        with torch.no_grad():
            output = unpacked(tiny_pair).target(
                input_ids=tokens[None], output_hidden_states=True, use_cache=False
            )
        states = output.hidden_states  # the last one is normalised
        expected = torch.cat([states[layer][0, :-1] for layer in LAYERS], dim=-1)
        near = {"rtol": 0.02, "atol": 0.02}  # recorded in bfloat16
        torch.testing.assert_close(batch.features[row, : length - 1].float(), expected, **near)
        logits = output.logits[0, text.prompt : length - 1]
        found = batch.normaliser[row, : text.length]
        torch.testing.assert_close(found, logits.logsumexp(-1), **near)


def test_a_training_has_texts_held_out_that_it_can_be_judged_on(recorded: Recorded) -> None:
    assert recorded.texts.split(HEAD.judged_at) == recorded.texts.split()
    with pytest.raises(UserError, match="too few answers to train on some and evaluate on"):
        recorded.texts.split((0.7,))


def test_the_rate_rises_and_falls_to_nothing() -> None:
    assert rate(0, 0.1) < 0.02
    assert rate(0.1, 0.1) == 1
    assert rate(1, 0.1) == pytest.approx(0)
