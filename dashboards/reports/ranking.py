"""A server's settings, ranked by replay."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards import cells
from dashboards.sections import Section
from specdec_core.config import distinct_labels
from specdec_core.search.results import METRIC, Trial


def ranking(trials: Sequence[Trial]) -> Section:
    """What a server can be told, the fastest by replay first."""
    names = distinct_labels(trial.configuration for trial in trials)
    rows = [
        {
            "setting": names[trial.id],
            "over autoregressive": cells.as_number(trial.metrics[METRIC], ".2f×"),
            "tokens a round": f"{trial.counts['n'] / max(trial.counts['n_target'], 1):.2f}",
        }
        for trial in trials
    ]
    return Section(key="ranking", shown=cells.texts(rows))
