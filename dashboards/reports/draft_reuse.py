"""What a fixed draft length wastes, by recordings (Post-use & Pre-cut, Fig. 2a and 2b)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from dashboards import cells
from dashboards.figures.draft_reuse import (
    lengths_by_round,
    lengths_svg,
    recycled_share,
    recycled_svg,
)
from dashboards.sections import Section
from specdec_core.studies.draft_reuse import LENGTH, BestLengths

LENGTHS = {
    "draft": cells.text("draft"),
    "rounds": cells.count("rounds"),
    "best fixed": cells.text("fixed"),
    "best of each round: mean": cells.number("mean", ".1f"),
    "deviation": cells.number("deviation", ".1f"),
    "median": cells.number("median", ".0f"),
    "shorter than fixed": cells.number("shorter", ".0%"),
    "longer": cells.number("longer", ".0%"),
}


def best_lengths(found: Sequence[BestLengths]) -> Section:
    """How the best length varies from round to round: a row a draft."""
    rows = [
        {
            "draft": each.draft,
            "rounds": len(each.rounds),
            "fixed": each.fixed,
            "mean": each.rounds["length"].mean(),
            "deviation": each.rounds["length"].std(),
            "median": each.rounds["length"].median(),
            "shorter": each.shorter,
            "longer": each.longer,
        }
        for each in found
    ]
    return Section(
        key="post-use-f2a",
        title="Best draft length, round by round (Fig. 2a)",
        note="The best length of a round is the number of candidates that the target would accept;"
        " the best fixed one is the fastest by Eq. 3. Rounds cut by the output's end are left out.",
        shown=cells.table(rows, LENGTHS),
        figure=lengths_by_round(found),
        svg=lengths_svg(found),
        frame=pd.concat([each.rounds.assign(draft=each.draft) for each in found]),
    )


def recycled(found: Mapping[str, pd.DataFrame]) -> Section:
    """How often phrases of earlier rounds come again: a row a draft and kind of call, a column a
    length of phrases, of all that was drafted and of what was rejected."""
    rows = []
    for draft, frame in found.items():
        for (call, of), group in frame.groupby(["call", "of"], sort=False):
            shares = {f"tokens {row.tokens}": row.share for row in group.itertuples()}
            rows.append({"draft": draft, "after a": call, "phrases": of, **shares})
    sizes = sorted({size for frame in found.values() for size in frame["tokens"]})
    columns = {
        "draft": cells.text("draft"),
        "after a": cells.text("after a"),
        "phrases": cells.text("phrases"),
        **{
            f"{size} token{'s' if size > 1 else ''}": cells.number(f"tokens {size}", ".0%")
            for size in sizes
        },
    }
    return Section(
        key="post-use-f2b",
        title="Phrases of earlier rounds that come again (Fig. 2b)",
        note=f"Plain drafting with λ = {LENGTH}: the share of the calls after which a phrase of so"
        " many tokens comes again that an earlier round drafted after the same token; of all that"
        " was drafted, and of what was rejected alone.",
        shown=cells.table(rows, columns),
        figure=recycled_share(found),
        svg=recycled_svg(found),
        frame=pd.concat([frame.assign(draft=draft) for draft, frame in found.items()]),
        ruled=cells.group_ends(row["draft"] for row in rows),
    )


def lengths_of(table: pd.DataFrame) -> Section:
    """The same from a table of all prompt sets and drafts, with columns prompts, draft, fixed,
    request, round, length."""
    groups = table.groupby(["prompts", "draft"], sort=False)
    return best_lengths(
        [
            BestLengths(f"{draft}, {prompts}", int(rows["fixed"].iloc[0]), pd.DataFrame(), rows)
            for (prompts, draft), rows in groups
        ]
    )


def phrases_of(table: pd.DataFrame) -> Section:
    """The same from a table of all prompt sets and drafts, with columns prompts, draft, call,
    tokens, of, calls, share."""
    groups = table.groupby(["prompts", "draft"], sort=False)
    return recycled({f"{draft}, {prompts}": rows for (prompts, draft), rows in groups})
