"""Improved MCSD's table and figure that are made from recorded prompts."""

from __future__ import annotations

import pandas as pd

from dashboards import cells
from dashboards.look import PART_COLOURS
from dashboards.sections import Section
from research.drift.report import TEXTS
from research.papers import mcsd
from research.papers.sections import verdicts
from research.papers.sections.section import Exhibit
from research.svg import SvgLine, lines_svg

OUTCOMES = {
    "accepted": PART_COLOURS["draft forwards, kept"],
    "rejected": PART_COLOURS["draft forwards, thrown away"],
}


def values(table: pd.DataFrame) -> Section:
    """A row a decision model; the histograms of the first one, T1."""
    found = mcsd.judged(table)
    shares = found[0].shares()
    rows = [
        {
            "decision model": each.kind,
            "draft": each.draft,
            "trained on": f"{each.trained:,}",
            "judged": f"{len(each.values):,}",
            "AUC": cells.as_number(each.auc, ".3f"),
            "overlap": cells.as_number(each.overlap, ".0%"),
            "accepted, but stopped at": cells.as_number(each.stopped, ".0%"),
            "rejected, but passed": cells.as_number(each.passed, ".0%"),
        }
        for each in found
    ]
    middles = ((shares["low"] + shares["high"]) / 2).tolist()
    return Section(
        note="Of candidates of prompts that the models were neither trained nor chosen on. Overlap"
        " is the area that the histograms of accepted and of rejected candidates share; the last"
        f" columns are with the threshold of {mcsd.THRESHOLD:g}.",
        svg=lines_svg(
            f"Values of {found[0].kind.upper()} by outcome",
            f"share of the accepted and of the rejected candidates; {found[0].draft}",
            [
                SvgLine(outcome, colour, middles, shares[outcome].tolist())
                for outcome, colour in OUTCOMES.items()
            ],
            ("value", "share"),
            {place / 10: f"{place / 10:g}" for place in range(1, 10)},
        ),
        shown=cells.texts(rows),
        ruled=cells.group_ends(row["draft"] for row in rows),
    )


def quality(table: pd.DataFrame) -> Section:
    """As `specdec lab drift` shows it."""
    return Section(
        note="Nats a token of the target's log-likelihood, and how much more than what the target"
        " itself writes, with a 95 % interval over prompts; and the share of tokens that it would"
        " have chosen greedily. Width 1 is lossless.",
        shown=cells.table(table, TEXTS),
        ruled=cells.group_ends(table["draft"]),
    )


MCSD = (
    Exhibit("mcsd-1", ("sampled",), mcsd.quality, quality, verdicts.mcsd_1),
    Exhibit("mcsd-f7", ("heads",), mcsd.values, values, verdicts.mcsd_f7),
)
