"""The loss that heads are trained with, and how well their probabilities fit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec_core.drafting.heads.card import ReliabilityBin

BINS = 10


def weighted_bce(logits: Tensor, labels: Tensor, w_acc: float, w_rej: float) -> Tensor:
    """SpecDec++'s loss (§4.4) as a mean: −w_acc·P·log P̂ − w_rej·(1 − P)·log(1 − P̂).

    `logits` and `labels` P are (n,); returns a scalar.
    """
    return (w_acc * labels * F.softplus(-logits) + w_rej * (1 - labels) * F.softplus(logits)).mean()


def binary_kl(logits: Tensor, labels: Tensor) -> Tensor:
    """KL(P ‖ P̂) = BCE(P, P̂) − H(P) in nats, the unweighted mean of SpecDec++'s Table 3."""
    entropy: Tensor = torch.special.entr(labels) + torch.special.entr(1 - labels)
    return weighted_bce(logits, labels, 1, 1) - entropy.mean()


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Probability that an accepted candidate scores above a rejected one, ties counted half.

    `labels` (n,) are acceptance probabilities: a candidate is accepted with weight P and rejected
    with weight 1 − P. NaN when all are accepted or all rejected.
    """
    order = np.argsort(scores, kind="stable")
    scores, labels = scores[order], labels[order].astype(np.float64)
    begins = np.flatnonzero(np.diff(scores, prepend=np.nan) != 0)  # of runs of equal scores
    accepted = np.add.reduceat(labels, begins)
    rejected = np.add.reduceat(1 - labels, begins)
    below = np.cumsum(rejected) - rejected
    pairs = accepted.sum() * rejected.sum()
    return float((accepted * (below + rejected / 2)).sum() / pairs) if pairs > 0 else float("nan")


def reliability(probabilities: np.ndarray, labels: np.ndarray) -> list[ReliabilityBin]:
    """Predictions (n,) in bins of equal width, empty ones left out."""
    index = np.minimum((probabilities * BINS).astype(int), BINS - 1)
    counts = np.bincount(index, minlength=BINS)
    predicted = np.bincount(index, probabilities, BINS)
    accepted = np.bincount(index, labels, BINS)
    return [
        ReliabilityBin(
            low=i / BINS,
            high=(i + 1) / BINS,
            count=int(counts[i]),
            predicted=float(predicted[i] / counts[i]),
            accepted=float(accepted[i] / counts[i]),
        )
        for i in np.flatnonzero(counts).tolist()
    ]


def calibration_error(bins: list[ReliabilityBin]) -> float:
    """ECE: the mean distance of prediction and outcome over bins, weighted by their counts."""
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.predicted - b.accepted) for b in bins) / max(total, 1)
