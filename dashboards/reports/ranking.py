"""A server's settings, ranked by replay."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards import cells
from dashboards.sections import Section
from specdec_core.config import distinct_labels
from specdec_core.search.results import METRIC, Trial

RANKED = {
    "setting": cells.text("setting"),
    "expected": cells.number("expected", ".2f×"),
    "tokens a round": cells.number("mat", ".2f"),
}


def ranking(trials: Sequence[Trial]) -> Section:
    """What a server can be told, the fastest by replay first."""
    names = distinct_labels(trial.configuration for trial in trials)
    rows = [
        {
            "setting": names[trial.id],
            "expected": trial.metrics[METRIC],
            "mat": trial.counts["n"] / max(trial.counts["n_target"], 1),
        }
        for trial in trials
    ]
    return Section(key="ranking", shown=cells.table(rows, RANKED))
