"""Improved MCSD on recorded prompts: the values of decision models (Fig. 7), and what
target-initialised trees cost in quality (Table 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from research.drift.by_width import on_texts, target_tree
from research.papers.post_use import draft_models
from specdec_core.config import Sampling
from specdec_core.drafting.heads.card import HeadSpec, HeadTrainingSettings
from specdec_core.drafting.heads.modules import HeadKind
from specdec_core.models.pair import load_pair
from specdec_core.recordings.schema import Recording
from specdec_core.training.heads.examples import Examples, load_examples
from specdec_core.training.heads.metrics import auc
from specdec_core.training.heads.training import HeadTraining

WIDTHS = (1, 2, 3)
BRANCHING = (4, 3, 1, 1)  # below the target's own tokens (§4.1)
SAMPLING = Sampling(temperature=0.7)
MOST = 4  # prompts of each set
TEXTS = 2  # of each prompt
LONGEST = 64  # tokens of a text
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


def values(recordings: Mapping[str, Recording]) -> pd.DataFrame:
    """One row a candidate that a decision model judged: kind, draft, trained (examples), value,
    accepted. Trained on some of the recordings' prompts, judged on the rest. Raises
    :class:`UserError` where these are too few, or the pair has no draft model."""
    sets = list(recordings.values())
    found = [
        train_and_judge(examples)
        for draft in draft_models(sets[0])
        for examples in load_examples(sets, draft, KINDS).values()
    ]
    parts = (
        pd.DataFrame({"value": each.values, "accepted": each.accepted}).assign(
            kind=each.kind, draft=each.draft, trained=each.trained
        )
        for each in found
    )
    return pd.concat(parts, ignore_index=True)


def judged(table: pd.DataFrame) -> list[DecisionValues]:
    """The decision models of a table of :func:`values`."""
    return [
        DecisionValues(
            rows["kind"].iloc[0],
            str(draft),
            int(rows["trained"].iloc[0]),
            rows["value"].to_numpy(),
            rows["accepted"].to_numpy(),
        )
        for (draft, _), rows in table.groupby(["draft", "kind"], sort=False)
    ]


def train_and_judge(
    examples: Examples, settings: HeadTrainingSettings = SETTINGS
) -> DecisionValues:
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


def quality(recordings: Mapping[str, Recording]) -> pd.DataFrame:
    """What target-initialised trees write for some recorded prompts, as the target judges it: the
    table of :func:`research.drift.by_width.on_texts` for every draft and width. Raises
    :class:`UserError` for a pair without a draft model."""
    first = next(iter(recordings.values()))
    drafts, header = draft_models(first), first.header
    trees = [target_tree(d, (w, *BRANCHING), SAMPLING) for d in drafts for w in WIDTHS]
    prompts = [
        tuple(t.tolist()) for each in recordings.values() for t in each.prompts.tokens[:MOST]
    ]
    longest = min(header.max_new_tokens, LONGEST)
    return on_texts(load_pair(header.pair), trees, SAMPLING, prompts, TEXTS, longest)
