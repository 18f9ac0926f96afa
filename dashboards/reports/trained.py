"""Models that were trained on recorded answers: how good they are, and what more training adds."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import pandas as pd

from dashboards import cells
from dashboards.sections import Section

if TYPE_CHECKING:
    from specdec_core.training.eagle.finished import EagleTrainingCard
    from specdec_core.training.recorded.finished import Finished
    from specdec_core.training.reduced_draft.training import DraftTrainingCard

_FURTHER = (2, 4, 10)  # times the tokens of the training


def acceptance(head: Finished[EagleTrainingCard]) -> Section:
    """An EAGLE head's acceptance of each position on prompts held out, greedy and sampled, if those
    before it are accepted, and the tokens that a chain yields: from any token, and round after
    round."""
    card = head.card
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
        shown=cells.table(pd.DataFrame(rows), columns),
        legend=f"on {card.texts['held_out']} answers held out; the draft vocabulary has"
        f" {card.coverage:.1%} of their tokens",
    )


def agreement(draft: Finished[DraftTrainingCard]) -> Section:
    """How often a distilled draft model agrees with its target a token ahead, on answers held
    out."""
    card = draft.card
    best = {"draft": draft.label, "coverage": card.coverage, **card.best.model_dump()}
    columns = {
        "draft": cells.text("draft"),
        "best tokens agree": cells.number("agreement", ".3f"),
        "Σ min(p, q)": cells.number("overlap", ".3f"),
        "tokens it can propose": cells.number("coverage", ".3f"),
    }
    return Section(
        key="agreement",
        shown=cells.table([best], columns),
        legend=f"on {card.texts['held_out']} answers held out",
    )


def learning(model: Finished[Any]) -> Section:
    """The evaluations of a training by tokens: measured, and extrapolated to some times as many."""
    from specdec_core.training.recorded.extrapolation import fitted

    card = model.card
    rows = [{"tokens": e.tokens, **card.learned(e), "from": "measured"} for e in card.curve]
    names = [n for n in card.learned(card.curve[0]) if all(n in row for row in rows)]
    # The models that were the best so far: after a restart the first ones are worse again.
    scores = [evaluation.score for evaluation in card.curve]
    best = [row for n, row in enumerate(rows) if scores[n] > max(scores[:n], default=-inf)]
    seen = [row["tokens"] for row in best]
    laws = {name: fitted(seen, [row[name] for row in best], card.limit) for name in names}
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
        " can be. It does not consider how the rate falls, nor sequences that are seen again.",
        shown=cells.table(frame, columns),
        frame=frame,
    )
