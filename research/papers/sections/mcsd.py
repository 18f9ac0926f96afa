"""Improved MCSD's table and figure that are made from recorded prompts."""

from __future__ import annotations

import pandas as pd

from dashboards import cells
from dashboards.look import PARTS
from dashboards.sections import Section
from research.drift.report import TEXTS
from research.papers import mcsd
from research.papers.decision_values import THRESHOLD
from research.papers.sections import verdicts
from research.papers.sections.section import PaperSection
from research.papers.studies import Study
from research.svg import SvgLine, lines_svg

OUTCOMES = {
    "accepted": PARTS["draft forwards, kept"],
    "rejected": PARTS["draft forwards, thrown away"],
}
VALUES = {
    "decision model": cells.text("kind"),
    "draft": cells.text("draft"),
    "trained on": cells.count("trained"),
    "judged": cells.count("judged"),
    "AUC": cells.number("auc", ".3f"),
    "overlap": cells.number("overlap", ".0%"),
    "accepted, but stopped at": cells.number("stopped", ".0%"),
    "rejected, but passed": cells.number("passed", ".0%"),
}


def values(table: pd.DataFrame) -> Section:
    """A row a decision model; the histograms of the first one, T1."""
    found = mcsd.judged(table)
    shares = found[0].shares()
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
        note="Of candidates of prompts that the models were neither trained nor chosen on. Overlap"
        " is the area that the histograms of accepted and of rejected candidates share; the last"
        f" columns are with the threshold of {THRESHOLD:g}.",
        svg=lines_svg(
            f"Values of {found[0].kind.upper()} by outcome",
            f"share of the accepted and of the rejected candidates; {found[0].draft}",
            [
                SvgLine(
                    outcome,
                    colour,
                    ((shares["low"] + shares["high"]) / 2).tolist(),
                    shares[outcome].tolist(),
                )
                for outcome, colour in OUTCOMES.items()
            ],
            ("value", "share"),
            {place / 10: f"{place / 10:g}" for place in range(1, 10)},
        ),
        shown=cells.table(rows, VALUES),
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
    PaperSection(
        study=Study("mcsd-1", ("sampled",), mcsd.quality),
        paper="Improving MCSD",
        source="Table 1",
        title="Quality of target-initialised trees by width and draft",
        reported="MT-Bench score of Llama-2-7B 6.29; with width 2 5.07 (−1.22) with TinyLlama-1.1B,"
        " 5.83 (−0.43) with Llama-68M; with width 3 4.32 (−1.97) and 5.69 (−0.60); with width 1"
        " within ±0.05.",
        setting="likelihood under the target in place of MT-Bench's judge; trees W×4×3×1×1,"
        f" temperature 0.7, {mcsd.MOST} prompts of each set, {mcsd.TEXTS} texts each of at most"
        f" {mcsd.LONGEST} tokens.",
        show=quality,
        verdict=verdicts.mcsd_1,
    ),
    PaperSection(
        study=Study("mcsd-f7", ("heads",), mcsd.values),
        paper="Improving MCSD",
        source="§3.3 and A.2, Fig. 7",
        title="Values of the decision models by outcome",
        reported="T1 “struggles to effectively distinguish between negative and positive examples”;"
        " a figure without numbers in the text.",
        setting="each draft model of the pair; T1, T2 and both in one are trained here, on greedy"
        " texts, with outcomes 0 and 1 as labels.",
        show=values,
        verdict=verdicts.mcsd_f7,
    ),
)
