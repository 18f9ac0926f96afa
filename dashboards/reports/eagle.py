"""A trained EAGLE head: acceptance by position."""

from __future__ import annotations

import pandas as pd

from dashboards import cells
from dashboards.sections import Section
from specdec_core.training.eagle.finished import EagleTrainingCard
from specdec_core.training.recorded.finished import Finished


def acceptance(head: Finished[EagleTrainingCard]) -> Section:
    """Acceptance of each position on prompts held out, greedy and sampled, if those before it are
    accepted, and the tokens that a chain yields: from any token, and round after round."""
    card = head.card
    found = card.best.acceptance
    rows = [
        {
            "decoding": kind,
            **{str(n): a for n, a in enumerate(positions, start=1)},
            "any": 1 + length,
            "round": tokens,
        }
        for kind, (positions, length, tokens) in found.kinds.items()
    ]
    columns = {
        "decoding": cells.text("decoding"),
        **{str(n): cells.number(str(n), ".3f") for n in range(1, card.settings.steps + 1)},
        "tokens from any token": cells.number("any", ".3f"),
        "tokens a round": cells.number("round", ".3f"),
    }
    return Section(
        key="acceptance",
        shown=cells.table(pd.DataFrame(rows), columns),
        legend=(
            f"on {card.texts['held_out']} answers held out; the draft vocabulary has"
            f" {card.coverage:.1%} of their tokens"
        ),
    )
