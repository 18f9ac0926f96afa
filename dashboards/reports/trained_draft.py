"""A draft distilled from its target: how often they agree."""

from __future__ import annotations

import pandas as pd

from dashboards import cells
from dashboards.sections import Section
from specdec_core.training.recorded.finished import Finished
from specdec_core.training.reduced_draft.training import DraftTrainingCard


def agreement(draft: Finished[DraftTrainingCard]) -> Section:
    """Agreement and overlap a token ahead, on answers held out."""
    card = draft.card
    row = {
        "draft": draft.label,
        "agreement": card.best.agreement,
        "overlap": card.best.overlap,
        "coverage": card.coverage,
    }
    columns = {
        "draft": cells.text("draft"),
        "best tokens agree": cells.number("agreement", ".3f"),
        "Σ min(p, q)": cells.number("overlap", ".3f"),
        "tokens it can propose": cells.number("coverage", ".3f"),
    }
    return Section(
        key="agreement",
        shown=cells.table(pd.DataFrame([row]), columns),
        legend=f"on {card.texts['held_out']} answers held out",
    )
