"""The loss is the paper's, and each figure is the statistic that it is named after."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from specdec_core.training.heads import metrics

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
