"""Examples with an acceptance that follows from their features by a known rule."""

import numpy as np

from specdec_core.config import Sampling
from specdec_core.drafting.heads.modules import HeadKind
from specdec_core.training.heads.examples import DEV, TEST, TRAIN, Examples

PAIR = {"target": "0123456789abcdef", "draft": "fedcba9876543210"}


def learnable(kind: HeadKind = "specdecpp", rows: int = 2000, hidden: int = 8) -> Examples:
    """P(accepted) = σ(2x₀ + 1) of the first feature x₀, on a scale and offset that training has to
    undo; a tenth is in dev, a tenth in test."""
    rng = np.random.default_rng(0)
    size = {"specdecpp": hidden, "t1": hidden, "t2": 4, "joint": hidden + 4}[kind]
    features = rng.normal(size=(rows, size)).astype(np.float32)
    labels = (1 / (1 + np.exp(-(2 * features[:, 0] + 1)))).astype(np.float32)
    return Examples(
        kind=kind,
        features=100 + 20 * features,
        labels=labels,
        split=rng.choice([TRAIN, DEV, TEST], rows, p=[0.8, 0.1, 0.1]),
        draft="small",
        hidden_size=hidden,
        top_k=3,
        pair=PAIR,
        sampling=Sampling(),
        recordings=("recording",),
    )
