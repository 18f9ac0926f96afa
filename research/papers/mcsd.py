"""Improved MCSD on recorded prompts: the values of decision models (Fig. 7)."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from research.papers.decision_values import DecisionValues, decision_values
from research.papers.post_use import draft_models
from specdec_core.recordings.schema import Recording


def values(recordings: Mapping[str, Recording]) -> pd.DataFrame:
    """One row a candidate that a decision model judged: kind, draft, trained (examples), value,
    accepted. Trained on some of the recordings' prompts, judged on the rest. Raises
    :class:`UserError` where these are too few, or the pair has no draft model."""
    first = next(iter(recordings.values()))
    parts = [
        pd.DataFrame({"value": each.values, "accepted": each.accepted}).assign(
            kind=each.kind, draft=each.draft, trained=each.trained
        )
        for draft in draft_models(first)
        for each in decision_values(list(recordings.values()), draft)
    ]
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
