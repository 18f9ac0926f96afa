"""Training of heads finds what is in the examples; its loss and figures are as defined."""

import numpy as np
import pytest
import torch
from safetensors.torch import load
from sklearn.metrics import roc_auc_score

from specdec_core.drafting.heads.card import HeadSpec, HeadTrainingSettings
from specdec_core.drafting.heads.loaded import LoadedHead
from specdec_core.drafting.heads.modules import build_head
from specdec_core.drafting.heads.storage import load_card, save_head
from specdec_core.training.heads import metrics
from specdec_core.training.heads.examples import DEV, TEST, TRAIN
from specdec_core.training.heads.training import HeadTraining
from tests.specdec_core.drafting.heads.examples import learnable

SETTINGS = HeadTrainingSettings(learning_rate=3e-2, batch_size=128, epochs=6)


def train(spec, settings=SETTINGS):
    return HeadTraining(spec, learnable(spec.kind), settings).run()


def loaded(trained):
    card = trained.card
    head = build_head(card.kind, card.hidden_size, card.top_k, card.depth, card.width)
    head.load_state_dict(load(trained.weights))
    return LoadedHead(head, card)


@pytest.mark.parametrize(
    "spec",
    [
        HeadSpec(depth=0),
        HeadSpec(depth=3),
        HeadSpec(kind="t1", width=16),
        HeadSpec(kind="t2", width=16),
        HeadSpec(kind="joint", width=16),
    ],
    ids=lambda spec: spec.label,
)
def test_a_learnable_rule_is_learned_by_every_kind(spec):
    metrics = train(spec).card.metrics
    assert metrics["eval_kl"] < 0.05  # 0.21 for the mean of the labels
    assert metrics["ece"] < 0.1
    assert metrics["auc"] > 0.8


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    first, second = train(HeadSpec()), train(HeadSpec())
    assert first.weights == second.weights
    assert first.card == second.card
    other = train(HeadSpec(), SETTINGS.model_copy(update={"seed": 1}))
    assert other.weights != first.weights
    assert other.card.training != first.card.training


def test_a_larger_weight_of_rejections_lowers_predictions():
    examples = learnable()
    features = torch.tensor(examples.features)
    means = [
        loaded(train(HeadSpec(depth=1, w_rej=w))).probabilities(features).mean().item()
        for w in (1, 3, 12)
    ]
    assert means[0] == pytest.approx(examples.labels.mean(), abs=0.03)
    assert means[0] > means[1] + 0.1 > means[2] + 0.2


def test_the_weights_of_the_epoch_with_the_least_eval_loss_are_kept():
    # So large a rate that the loss goes up and down.
    settings = HeadTrainingSettings(learning_rate=1.0, batch_size=128, epochs=6)
    trained = train(HeadSpec(depth=2), settings)
    card = trained.card
    losses = [epoch.eval_loss for epoch in card.curve]
    assert len(losses) == 6
    assert card.metrics["eval_loss"] == pytest.approx(min(losses), rel=1e-4)  # as stored
    assert losses[int(card.metrics["epoch"]) - 1] == min(losses)
    assert min(losses) < losses[0]


def trained_with_wrong_labels(part):
    """The labels of one split are the opposite of what the features say."""
    examples = learnable()
    wrong = examples.split == part
    examples.labels[wrong] = 1 - examples.labels[wrong]
    return HeadTraining(HeadSpec(depth=0), examples, SETTINGS).run()


def test_dev_rows_are_not_trained_on():
    card = trained_with_wrong_labels(DEV).card
    assert card.metrics["train_kl"] < 0.2 < card.metrics["eval_kl"]
    split = learnable().split
    counts = {name: int(np.sum(split == n)) for n, name in enumerate(("train", "eval", "test"))}
    assert card.examples == counts


def test_test_rows_change_the_figures_and_no_choice():
    right, wrong = train(HeadSpec(depth=0)), trained_with_wrong_labels(TEST)
    assert wrong.weights == right.weights
    assert wrong.card.curve == right.card.curve
    assert right.card.metrics["auc"] > 0.8
    assert wrong.card.metrics["auc"] < 0.5
    assert wrong.card.metrics["test_kl"] > right.card.metrics["test_kl"] + 0.2
    assert sum(bin.count for bin in wrong.card.reliability) == wrong.card.examples["test"]


def test_a_head_is_read_again_where_all_candidates_of_dev_and_test_are_accepted(tmp_path):
    examples = learnable()
    examples.labels[examples.split != TRAIN] = 1
    trained = HeadTraining(HeadSpec(depth=0), examples, SETTINGS).run()
    save_head(trained.weights, trained.card, tmp_path)
    card = load_card(tmp_path)
    assert np.isnan(card.metrics["auc"])  # no rejected candidate to compare with
    assert np.isnan([epoch.auc for epoch in card.curve]).all()


LABELS = torch.tensor([1.0, 0.0, 0.25, 0.9])
LOGITS = torch.tensor([2.0, -1.0, 0.5, -3.0])


def test_the_loss_is_equation_of_section_4_4():
    predicted = LOGITS.sigmoid()
    expected = -(2 * LABELS * predicted.log() + 6 * (1 - LABELS) * (1 - predicted).log()).mean()
    torch.testing.assert_close(metrics.weighted_bce(LOGITS, LABELS, 2, 6), expected)


def test_kl_is_bce_less_entropy_and_zero_for_the_truth():
    p, q = LABELS[2:], LOGITS[2:].sigmoid()
    expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    torch.testing.assert_close(metrics.binary_kl(LOGITS[2:], p), expected)
    truth = torch.tensor([0.2, 0.5, 0.99])
    assert metrics.binary_kl(truth.logit(), truth).item() == pytest.approx(0, abs=1e-6)


def test_auc_weighs_each_candidate_by_its_chance_of_being_accepted():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 9, 300) / 8  # with ties
    labels = rng.random(300)
    expected = roc_auc_score(
        np.repeat([1, 0], 300),
        np.tile(scores, 2),
        sample_weight=np.concatenate([labels, 1 - labels]),
    )
    assert metrics.auc(scores, labels) == pytest.approx(expected)
    assert metrics.auc(np.array([0.9, 0.1]), np.array([1.0, 0.0])) == 1
    assert np.isnan(metrics.auc(scores, np.ones(300)))


def test_reliability_bins_hold_every_prediction_once():
    probabilities = np.array([0.0, 0.05, 0.31, 0.39, 1.0])
    labels = np.array([0.0, 0.5, 1.0, 0.0, 1.0])
    bins = metrics.reliability(probabilities, labels)
    assert [(b.low, b.high, b.count) for b in bins] == [(0, 0.1, 2), (0.3, 0.4, 2), (0.9, 1, 1)]
    assert [b.predicted for b in bins] == pytest.approx([0.025, 0.35, 1.0])
    assert [b.accepted for b in bins] == pytest.approx([0.25, 0.5, 1.0])
    expected = (2 * 0.225 + 2 * 0.15) / 5
    assert metrics.calibration_error(bins) == pytest.approx(expected)
