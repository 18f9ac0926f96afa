"""The values of decision models by outcome (improved MCSD, Fig. 7)."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from dashboards import cells
from dashboards.figures.decision_values import values_by_outcome, values_svg
from dashboards.sections import Section
from specdec_core.studies.decision_values import THRESHOLD, DecisionValues

COLUMNS = {
    "decision model": cells.text("kind"),
    "draft": cells.text("draft"),
    "trained on": cells.count("trained"),
    "judged": cells.count("judged"),
    "AUC": cells.number("auc", ".3f"),
    "overlap": cells.number("overlap", ".0%"),
    "accepted, but stopped at": cells.number("stopped", ".0%"),
    "rejected, but passed": cells.number("passed", ".0%"),
}


def decision_values(found: Sequence[DecisionValues]) -> Section:
    """A row a decision model."""
    rows = [
        {
            "kind": each.kind,
            "draft": each.draft,
            "trained": each.trained,
            "judged": len(each.values),
            "auc": each.auc,
            "overlap": each.overlap,
            "stopped": each.stopped,
            "passed": each.passed,
        }
        for each in found
    ]
    return Section(
        key="mcsd-f7",
        title="Values of decision models by outcome (Fig. 7)",
        note="Of candidates of prompts that the models were neither trained nor chosen on. Overlap"
        " is the area that the histograms of accepted and of rejected candidates share; the last"
        f" columns are with the threshold of {THRESHOLD:g}.",
        shown=cells.table(rows, COLUMNS),
        figure=values_by_outcome(found),
        svg=values_svg(found),
        frame=pd.concat(each.shares().assign(kind=each.kind, draft=each.draft) for each in found),
    )


def judged_of(table: pd.DataFrame) -> list[DecisionValues]:
    """Decision models from a table with a row a candidate: kind, draft, trained, value,
    accepted."""
    return [
        DecisionValues(
            kind,
            draft,
            int(rows["trained"].iloc[0]),
            rows["value"].to_numpy(),
            rows["accepted"].to_numpy(),
        )
        for (draft, kind), rows in table.groupby(["draft", "kind"], sort=False)
    ]


def values_of(table: pd.DataFrame) -> Section:
    """The same from such a table."""
    return decision_values(judged_of(table))
