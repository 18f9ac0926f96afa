"""Heads learn from features that are recorded once."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import Sampling
from specdec_core.models.eagle import EagleHead, EagleSettings
from specdec_core.models.eagle.formats.speculators import EagleCard
from specdec_core.models.eagle.head import EagleOneHead
from specdec_core.models.eagle.loading import load_head, save_head
from specdec_core.recordings.schema import Recording, save_header
from specdec_core.training.eagle.acceptance import Acceptance
from specdec_core.training.eagle.settings import EagleEvaluation, EagleTrainingSettings
from specdec_core.training.eagle.training import EagleTraining, EagleTrainingCard
from specdec_core.training.recorded.features import RecordedAnswers, RecordedTexts, record_features
from specdec_core.training.recorded.gather import gather_features
from specdec_core.training.recorded.training import rate, target_config
from specdec_core.training.trainer import LoopReport
from tests.specdec_core.models.eagle.test_round_trip import written
from tests.specdec_core.training.conftest import LAYERS, evaluated, recorded_answers, unpacked

SETTINGS = EagleTrainingSettings(
    draft_vocab_size=200, steps=3, learning_rate=3e-3, batch_tokens=200, epochs=6, evaluations=3
)


def test_a_head_learns_what_its_target_will_write(recorded, tmp_path, monkeypatch):
    # On a busy machine there are reports between evaluations, whose losses are of a few batches.
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr("specdec_core.training.trainer.time", clock)
    training = EagleTraining(recorded.texts, SETTINGS)
    before = evaluated(training)
    heard: list[tuple[LoopReport, str]] = []
    training.run(tmp_path, lambda *standing: heard.append(standing))
    best = max(training.curve, key=lambda e: e.score)
    assert evaluated(training).acceptance == best.acceptance
    before, after = before.acceptance, best.acceptance
    assert len(after.greedy) == len(after.sampled) == SETTINGS.steps
    assert after.kinds["greedy"][1] > before.kinds["greedy"][1] + 0.5
    assert after.kinds["temperature 1"][1] > before.kinds["temperature 1"][1] + 0.15
    assert 1 < before.greedy_tokens + 0.2 < after.greedy_tokens <= 1 + SETTINGS.steps
    assert training.curve[-1].loss < training.curve[0].loss
    told = [(standing.count, summary) for standing, summary in heard if summary]
    assert told == [(e.tokens, e.summary) for e in training.curve]


def test_the_loss_of_a_head_is_the_one_that_was_asked_for(recorded):
    losses = []
    for kind in ("cross_entropy", "acceptance"):
        settings = SETTINGS.model_copy(update={"loss": kind, "share": 1.0})  # no random chains
        training = EagleTraining(recorded.texts, settings)
        [batch] = training._batches([0])
        with torch.autocast(training.device.type, dtype=training.type):
            losses.append(training.loss(batch).item())
    assert 0 < losses[1] < losses[0]


def test_a_head_is_trained_further(recorded, tmp_path):
    little = {"epochs": 1, "matrix_rate": 0.002, "learning_rate": 1e-4}
    first = EagleTraining(recorded.texts, SETTINGS.model_copy(update=little))
    first.run(tmp_path / "first")
    first.save(tmp_path / "head")
    further = {"draft_vocab_size": None, "start": str(tmp_path / "head"), "epochs": 2}
    second = EagleTraining(recorded.texts, SETTINGS.model_copy(update=further))
    saved = evaluated(first).score
    assert evaluated(second).score == pytest.approx(saved, abs=0.03)
    assert second.output.shape == first.output.shape
    second.run(tmp_path / "second")
    best = max(second.curve, key=lambda evaluation: evaluation.score)
    assert second.curve[0].share < 0.1 < best.share
    assert best.score > saved + 0.1
    second.save(tmp_path / "further")
    third = EagleTraining(
        recorded.texts, EagleTrainingSettings(steps=3, start=str(tmp_path / "further"))
    )
    assert evaluated(third).score == pytest.approx(best.score, abs=0.03)
    assert EagleTrainingCard.load(tmp_path / "further").settings.start == str(tmp_path / "head")


def test_the_best_head_is_the_one_whose_rounds_have_the_most_tokens():
    """A round begins where candidates have failed, so chains from any token say less."""
    acceptance = Acceptance(greedy=(0.7,), sampled=(0.8,), greedy_tokens=1.6, sampled_tokens=1.9)
    assert EagleEvaluation(acceptance=acceptance).score == 1.6
    sampled = acceptance.model_copy(update={"greedy": ()})
    assert EagleEvaluation(acceptance=sampled).score == 1.9
    before = Acceptance(greedy=(0.5, 0.5), sampled=())  # of a card from before rounds were counted
    assert EagleEvaluation(acceptance=before).score == 1.75


def shape(texts, layers):
    return EagleSettings.for_target(target_config(texts.card.config), 200, feature_layers=layers)


def test_a_head_keeps_an_embedding_of_its_own(recorded, tmp_path):
    head, config = (
        EagleHead(shape(recorded.texts, LAYERS)),
        target_config(recorded.texts.card.config),
    )
    table = torch.rand(config.vocab_size, config.hidden_size)
    head.embed_tokens = nn.Embedding.from_pretrained(table.bfloat16().float())
    save_head(head, tmp_path / "head", EagleCard(target="some"), embedding=True)
    settings = EagleTrainingSettings(steps=2, epochs=1, start=str(tmp_path / "head"))
    training = EagleTraining(recorded.texts, settings)
    training.run(tmp_path / "run")
    training.save(tmp_path / "further")
    kept = load_head(str(tmp_path / "further"), config).embed_tokens
    assert torch.equal(kept.weight, head.embed_tokens.weight)


def test_a_head_that_cannot_be_trained_further_is_refused(recorded, tmp_path):
    with pytest.raises(ValueError, match="draft_vocab_size: some has its own"):
        EagleTrainingSettings(start="some", draft_vocab_size=100)
    save_head(EagleHead(shape(recorded.texts, (0, 1))), tmp_path / "two", EagleCard(target="some"))
    written(tmp_path / "one", EagleOneHead(shape(recorded.texts, (2,)), True, False))
    for name, complaint in (
        ("two", r"reads the layers \[0, 1\], the features are of \[0, 1, 2\]"),
        ("one", "an EAGLE-1 head; heads of EAGLE-3 can be trained further"),
        ("none", "no such folder"),
    ):
        with pytest.raises(UserError, match=complaint):
            EagleTraining(recorded.texts, EagleTrainingSettings(start=str(tmp_path / name)))


def test_features_are_recorded_once_and_resumed(tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setattr("specdec_core.training.recorded.features.SHARD", 8)
    features = tmp_path / "features"
    answers = recorded_answers(tiny_pair, tmp_path / "answers", prompts=20, new_tokens=6)
    pair = unpacked(tiny_pair)
    record_features(pair, LAYERS, answers, features)
    whole = {path.name: path.read_bytes() for path in features.glob("0*.safetensors")}
    assert len(whole) == 3
    (features / "00001.safetensors").unlink()
    kept = (features / "00000.safetensors").stat().st_mtime_ns
    record_features(pair, LAYERS, answers, features)
    assert (features / "00000.safetensors").stat().st_mtime_ns == kept
    assert {p.name: p.read_bytes() for p in features.glob("0*.safetensors")} == whole
    with pytest.raises(UserError, match="the features of other answers or layers"):
        record_features(pair, (1,), answers, features)


def test_features_of_other_answers_are_refused(tiny_pair, tmp_path):
    """Also where there are as many shards of them, and nothing is missing."""

    def gathered(answers):
        return gather_features(answers, LAYERS, 1, tmp_path, Observer(), lambda line: None)

    one, two = (
        recorded_answers(tiny_pair, tmp_path / str(n), prompts=n, new_tokens=4) for n in (20, 21)
    )
    features = gathered(one)
    assert gathered(one) == features
    with pytest.raises(UserError, match="of other answers or layers; name another --out"):
        gathered(two)


def test_answers_that_cannot_be_learned_from_are_refused(tiny_pair, tmp_path):
    found = recorded_answers(tiny_pair, tmp_path, prompts=4, new_tokens=2)
    short = RecordedAnswers(found.recordings, 3).texts
    assert sorted(len(text.prompt) for text in short) == [2, 3]
    with pytest.raises(UserError, match="no prompts of at most 1 tokens"):
        _ = RecordedAnswers(found.recordings, 1).texts
    recording = found.recordings[0]
    with pytest.raises(UserError, match="the same answers twice"):
        RecordedAnswers([recording, found.recordings[1], Recording.open(recording.folder)], 400)
    for changes, complaint in (
        ({"fingerprints": {"target": "0"}}, "the answers of other weights than are here"),
        ({"sampling": Sampling(temperature=1, top_k=4)}, "sampled with top-k, top-p or min-p"),
        ({"sampling": Sampling(temperature=1, min_p=0.1)}, "sampled with top-k, top-p or min-p"),
    ):
        header = recording.header.model_copy(update=changes)
        save_header(header, recording.folder)
        with pytest.raises(UserError, match=complaint):
            RecordedAnswers([Recording.open(recording.folder)], 400)


def test_features_are_those_of_each_text_alone(tiny_pair, recorded):
    texts = RecordedTexts(recorded.features)
    batch = texts.batch([3, 17, 40])
    length = batch.features.shape[1]  # of few, whatever the texts are
    assert (length % 64, batch.chains % 16, batch.tokens.shape[1]) == (0, 0, length + 1)
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


def test_a_training_has_texts_held_out_that_it_can_be_judged_on(recorded):
    assert recorded.texts.split(EagleTraining.judged_at) == recorded.texts.split()
    with pytest.raises(UserError, match="too few answers to train on some and evaluate on"):
        recorded.texts.split((0.7,))


def test_a_training_is_judged_on_answers_at_its_temperatures_alone(recorded):
    class Sampled(EagleTraining):
        judged_at = (1.0,)

    def temperatures(numbers):
        return {recorded.texts.texts[number].temperature for number in numbers}

    training = Sampled(recorded.texts, SETTINGS)
    assert temperatures(training.held_out) == {1.0}
    assert temperatures(training.trained_on) == {0.0, 1.0}
    assert evaluated(training).acceptance.kinds.keys() == {"temperature 1"}


def test_the_rate_rises_and_falls_to_nothing():
    assert rate(0, 0.1) < 0.02
    assert rate(0.1, 0.1) == 1
    assert rate(1, 0.1) == pytest.approx(0)
