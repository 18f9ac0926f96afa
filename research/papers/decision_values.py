"""The values of decision models by outcome (improved MCSD, Fig. 7): how well they tell candidates
that the target accepts from those that it rejects."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from specdec_core.drafting.heads.card import HeadSpec, HeadTrainingSettings
from specdec_core.drafting.heads.modules import HeadKind
from specdec_core.training.heads.examples import Examples
from specdec_core.training.heads.metrics import auc
from specdec_core.training.heads.training import HeadTraining

KINDS: tuple[HeadKind, ...] = ("t1", "t2", "joint")
THRESHOLD = 0.4  # below it drafting stops (§3.3)
BINS = 20
SETTINGS = HeadTrainingSettings(epochs=30)  # the best of them, on dev, is kept


@dataclass(frozen=True)
class DecisionValues:
    """A decision model's `values` (n,) for candidates of prompts that it was neither trained nor
    chosen on, and whether each was `accepted` (n,): 0 or 1, a probability under sampling."""

    kind: HeadKind
    draft: str
    trained: int  # examples
    values: np.ndarray
    accepted: np.ndarray

    @property
    def auc(self) -> float:
        """The chance that an accepted candidate has a higher value than a rejected one."""
        return auc(self.values, self.accepted)

    @property
    def stopped(self) -> float:
        """Share of the accepted candidates at which a chain would stop: prematurely."""
        return _share(self.values < THRESHOLD, self.accepted)

    @property
    def passed(self) -> float:
        """Share of the rejected candidates after which a chain would continue."""
        return _share(self.values >= THRESHOLD, 1 - self.accepted)

    @property
    def overlap(self) -> float:
        """The area that both histograms have in common: 1 where they are the same."""
        shares = self.shares()
        return float(np.minimum(shares["accepted"], shares["rejected"]).sum())

    def shares(self) -> pd.DataFrame:
        """One row a bin of the value (`low`, `high`): the share of the `accepted` and of the
        `rejected` candidates in it."""
        edges = np.linspace(0, 1, BINS + 1)
        parts = {
            name: np.histogram(self.values, edges, weights=weights)[0] / max(weights.sum(), 1e-9)
            for name, weights in (("accepted", self.accepted), ("rejected", 1 - self.accepted))
        }
        return pd.DataFrame({"low": edges[:-1], "high": edges[1:], **parts})


def judged(examples: Examples, settings: HeadTrainingSettings = SETTINGS) -> DecisionValues:
    """Train a decision model on some prompts' examples (train), keep its best epoch (dev), and let
    it judge the candidates of the remaining prompts (test). Raises :class:`UserError` for too few
    prompts."""
    training = HeadTraining(HeadSpec(kind=examples.kind), examples, settings)
    training.run()
    values, accepted = training.tested()
    return DecisionValues(examples.kind, examples.draft, len(training.train_rows), values, accepted)


def _share(chosen: np.ndarray, weights: np.ndarray) -> float:
    """The share of the weights that is `chosen`; NaN where there is no weight."""
    return float(weights[chosen].sum() / weights.sum()) if weights.any() else float("nan")
