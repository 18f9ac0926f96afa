"""Improved MCSD's figure that recordings hold: the values of decision models (Fig. 7)."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from specdec_core.base.errors import UserError
from specdec_core.recordings.schema import Recording
from specdec_core.studies.decision_values import decision_values


def values(recordings: Mapping[str, Recording]) -> pd.DataFrame:
    """One row a candidate that a decision model judged: kind, draft, trained (examples), value,
    accepted. Trained on some of the recordings' prompts, judged on others. Raises
    :class:`UserError` where these are too few, or the pair has no draft model."""
    first = next(iter(recordings.values()))
    parts = [
        pd.DataFrame({"value": each.values, "accepted": each.accepted}).assign(
            kind=each.kind, draft=each.draft, trained=each.trained
        )
        for draft in first.header.pair.drafts
        if draft not in first.header.eagle_heads
        for each in decision_values(list(recordings.values()), draft)
    ]
    if not parts:
        raise UserError("the pair has no draft model")
    return pd.concat(parts, ignore_index=True)
