"""Heads learn, and an interrupted training ends as an uninterrupted one does."""

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
from specdec_core.training.recorded.schedule import plan_epoch, rate
from tests.specdec_core.training.conftest import LAYERS, Recorded, answer_prompts, unpacked

SETTINGS = EagleTrainingSettings(
    draft_vocab_size=200,
    steps=3,
    learning_rate=3e-3,
    batch_tokens=200,
    epochs=6,
    evaluations=3,
)


def run(training: EagleTraining) -> EagleTraining:
    while not training.done:
        training.advance(60)
    return training


def test_a_head_learns_what_its_target_will_write(recorded: Recorded, tmp_path: Path) -> None:
    untrained = EagleTraining(recorded.texts, SETTINGS, tmp_path / "untrained.pt")
    before = untrained._evaluate().acceptance
    training = run(EagleTraining(recorded.texts, SETTINGS, tmp_path / "checkpoint.pt"))
    after = max(training.curve, key=lambda e: e.acceptance.length).acceptance
    assert len(after.greedy) == len(after.sampled) == SETTINGS.steps
    assert after.greedy_length > before.greedy_length + 0.5
    assert after.sampled_length > before.sampled_length + 0.15
    assert after.greedy_tokens is not None
    assert before.greedy_tokens is not None
    assert 1 < before.greedy_tokens + 0.2 < after.greedy_tokens <= 1 + SETTINGS.steps
    assert training.curve[-1].loss < training.curve[0].loss


def test_a_trainings_digest_is_that_of_earlier_versions() -> None:
    """Or a training that they began would begin anew: it is of the settings in this order."""
    assert EagleTrainingSettings(minutes=2).model_dump_json() == (
        '{"draft_vocab_size":8192,"steps":5,"share":0.8,"learning_rate":0.001,"warmup":0.03,'
        '"weight_decay":0.0,"clip":1.0,"batch_tokens":512,"epochs":3,"minutes":2.0,'
        '"evaluations":12,"patience":4,"evaluation_texts":128,"seed":0}'
    )


def test_an_interrupted_training_ends_with_the_same_weights(
    recorded: Recorded, tmp_path: Path
) -> None:
    settings = SETTINGS.model_copy(update={"epochs": 2, "evaluations": 2})
    whole = run(EagleTraining(recorded.texts, settings, tmp_path / "whole.pt"))
    done = False
    while not done:  # every process takes one step
        part = EagleTraining(recorded.texts, settings, tmp_path / "parts.pt")
        part.advance(1e-9)
        done = part.done
    assert (part.tokens, part.curve) == (whole.tokens, whole.curve)
    for name, weight in whole.finished().state_dict().items():
        torch.testing.assert_close(part.finished().state_dict()[name], weight, rtol=0, atol=0)


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


def test_every_text_is_in_one_batch_that_is_no_larger_than_asked() -> None:
    lengths = {number: 1 + number % 37 for number in range(700)}
    batches = plan_epoch(list(lengths), lengths, 100, seed=0, epoch=1)
    assert sorted(number for batch in batches for number in batch) == list(lengths)
    assert all(len(batch) * max(lengths[n] for n in batch) <= 100 for batch in batches)
    assert batches == plan_epoch(list(lengths), lengths, 100, seed=0, epoch=1)
    assert batches != plan_epoch(list(lengths), lengths, 100, seed=0, epoch=2)


def test_the_rate_rises_and_falls_to_nothing() -> None:
    assert rate(0, 0.1) < 0.02
    assert rate(0.1, 0.1) == 1
    assert rate(1, 0.1) == pytest.approx(0)
