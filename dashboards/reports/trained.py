"""Models that were trained on recorded answers: how good they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards import cells
from dashboards.sections import Section

if TYPE_CHECKING:
    from specdec_core.training.eagle.training import EagleTrainingCard
    from specdec_core.training.reduced_draft.training import DraftTrainingCard


def acceptance(card: EagleTrainingCard) -> Section:
    """An EAGLE head's acceptance of each position on prompts held out, greedy and sampled, if those
    before it are accepted, and the tokens that a chain yields: from any token, and round after
    round."""
    rows = [
        {"decoding": kind, **dict(enumerate(shares, start=1)), "any": 1 + length, "round": tokens}
        for kind, (shares, length, tokens) in card.best.acceptance.kinds.items()
    ]
    columns = {
        "decoding": cells.text("decoding"),
        **{str(n): cells.number(n, ".3f") for n in range(1, card.settings.steps + 1)},
        "tokens from any token": cells.number("any", ".3f"),
        "tokens a round": cells.number("round", ".3f"),
    }
    return Section(
        key="acceptance",
        shown=cells.table(rows, columns),
        legend=f"on {card.texts['held_out']} answers held out; the draft vocabulary has"
        f" {card.coverage:.1%} of their tokens",
    )


def agreement(card: DraftTrainingCard) -> Section:
    """How often a distilled draft model agrees with its target a token ahead, on answers held
    out."""
    best = {
        "best tokens agree": card.best.agreement,
        "Σ min(p, q)": card.best.overlap,
        "tokens it can propose": card.coverage,
    }
    return Section(
        key="agreement",
        shown=cells.texts([{name: cells.as_number(v, ".3f") for name, v in best.items()}]),
        legend=f"on {card.texts['held_out']} answers held out",
    )
