"""BanditSpec's figure of several requests at once."""

from __future__ import annotations

import pandas as pd

from dashboards import cells
from dashboards.reports.paper_sections.section import PaperSection, shown_range
from dashboards.sections import Section
from specdec_core.studies.papers import banditspec
from specdec_core.studies.papers.studies import TABLES, Study

COLUMNS = {
    "": cells.text("name"),
    "MAT": cells.number("mat", ".2f"),
    "tokens/s": cells.number("tokens_per_second", ".1f"),
    "over the best length": cells.ratio("over_best", "low", "high"),
    "regret (rounds)": cells.number("regret_rounds", "+.0f"),
}


def together(table: pd.DataFrame) -> Section:
    """The lengths, and the bandits over them."""
    return Section(
        key="",
        note=f"{table['requests'].iloc[0]} requests, {banditspec.SLOTS} at once; each has its own"
        f" length. Drafts are {table['draft'].iloc[0]}'s.",
        shown=cells.table(table, COLUMNS),
        marked=[int(table["tokens_per_second"].argmax())],
        legend="Bold: the most tokens a second.",
        ruled=cells.group_ends(table["kind"]),
    )


BANDITSPEC = (
    PaperSection(
        Study("banditspec-batch", ("greedy", TABLES), banditspec.together),
        "BanditSpec",
        "setting two",
        "Draft lengths as arms, several requests at once",
        "both algorithms beside fixed lengths γ of 1 to 4 of an Eagle-1 head (a drawing only).",
        "live; the pair's first EAGLE head, or its first draft model where it has none; greedy, the"
        " prompt sets in turn.",
        together,
        lambda table: (
            "over the best length "
            + shown_range(table.loc[table["kind"] == "bandit", "over_best"], ".2f×")
        ),
    ),
)
