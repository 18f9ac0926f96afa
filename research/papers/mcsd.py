"""Improved MCSD on recorded prompts: the values of decision models (Fig. 7), and what
target-initialised trees cost in quality (Table 1)."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from research.drift.by_width import on_texts, target_tree
from research.papers import decision_values
from research.papers.decision_values import KINDS, DecisionValues
from research.papers.post_use import draft_models
from specdec_core.config import Sampling
from specdec_core.models.pair import load_pair
from specdec_core.recordings.schema import Recording
from specdec_core.training.heads.examples import load_examples

WIDTHS = (1, 2, 3)
BRANCHING = (4, 3, 1, 1)  # below the target's own tokens (§4.1)
SAMPLING = Sampling(temperature=0.7)
MOST = 4  # prompts of each set
TEXTS = 2  # of each prompt
LONGEST = 64  # tokens of a text


def values(recordings: Mapping[str, Recording]) -> pd.DataFrame:
    """One row a candidate that a decision model judged: kind, draft, trained (examples), value,
    accepted. Trained on some of the recordings' prompts, judged on the rest. Raises
    :class:`UserError` where these are too few, or the pair has no draft model."""
    sets = list(recordings.values())
    found = [
        decision_values.judged(examples)
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
