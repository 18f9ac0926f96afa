"""A training's evaluations over the tokens it has seen, and where they lead."""

from __future__ import annotations

from math import inf
from typing import Any

import pandas as pd

from dashboards import cells
from dashboards.sections import Section
from specdec_core.training.recorded.extrapolation import fitted
from specdec_core.training.recorded.finished import Finished

_FURTHER = (2, 4, 10)  # times the tokens of the training


def learning(model: Finished[Any]) -> Section:
    """Its figures by tokens: measured, and extrapolated to some times as many."""
    card = model.card
    rows = [{"tokens": e.tokens, **card.learned(e), "from": "measured"} for e in card.curve]
    # Earlier versions did not count all of them.
    names = [name for name in rows[0] if all(name in row for row in rows)][1:-1]
    # The models that were the best so far: behind a restart the first ones are worse again.
    scores = [evaluation.score for evaluation in card.curve]
    best = [row for n, row in enumerate(rows) if scores[n] > max(scores[:n], default=-inf)]
    tokens_seen = [row["tokens"] for row in best]
    laws = {name: fitted(tokens_seen, [row[name] for row in best], card.limit) for name in names}
    for more in _FURTHER:
        tokens = more * card.curve[-1].tokens
        expected = {name: law.at(tokens) for name, law in laws.items() if law is not None}
        if expected:
            rows.append({"tokens": tokens, **expected, "from": "extrapolated"})
    frame = pd.DataFrame(rows)
    columns = {
        "tokens trained on": cells.count("tokens"),
        **{name: cells.number(name, ".3f") for name in names},
        "": cells.text("from"),
    }
    return Section(
        key="learning",
        title="Learning curve",
        note=f"Extrapolated by a power law of what is missing to {card.limit:.2f}, the most that"
        " can be. It knows nothing of how the rate falls, nor of texts seen again.",
        shown=cells.table(frame, columns),
        frame=frame,
    )
