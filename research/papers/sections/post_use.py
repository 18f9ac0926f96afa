"""Post-use & Pre-cut's figures and tables that are made from recordings."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from dashboards import cells
from dashboards.look import DRAFT_COLOURS, MUTED, OTHER_COLOURS
from dashboards.sections import Section
from research.papers import post_use
from research.papers.component_times import CACHE, CONTROLLER, M_D, M_T, ROLL_BACK
from research.papers.sections import verdicts
from research.papers.sections.section import Exhibit
from research.papers.studies import TIMES
from research.svg import SvgLine, lines_of, lines_svg

SHOWN = 60  # rounds in a row
SET = {"prompts": cells.text("prompts"), "draft": cells.text("draft")}
OF_PAPER = {  # Llama-2-Chat 7B and 70B on four A6000
    M_D: "21 ms",
    M_T: "152 ms",
    CACHE: "0.1 ms",
    ROLL_BACK: "2 ms",
    CONTROLLER: "< 0.1 ms",
}
COMPONENTS = {
    "component": cells.text("component"),
    "paper, each": lambda row: OF_PAPER.get(row["component"], cells.NONE),
    "here, each, ms": cells.number("each", ".3f"),
    "a round": cells.number("a_round", ".1f"),
    "share": cells.number("share", ".1%"),
}


def lengths(table: pd.DataFrame) -> Section:
    """How the best length varies from round to round: a row a set and draft."""
    rows = [
        {
            "prompts": prompts,
            "draft": draft,
            "rounds": f"{len(each):,}",
            "best fixed": str(fixed),
            "best of each round: mean": cells.as_number(each["length"].mean(), ".1f"),
            "deviation": cells.as_number(each["length"].std(), ".1f"),
            "median": cells.as_number(each["length"].median(), ".0f"),
            "shorter than fixed": cells.as_number((each["length"] < fixed).mean(), ".0%"),
            "longer": cells.as_number((each["length"] > fixed).mean(), ".0%"),
        }
        for prompts, draft, fixed, each in _fixed(table)
    ]
    prompts, draft, fixed, first = next(_fixed(table))
    shown = first["length"].head(SHOWN).tolist()
    places = [*range(1, len(shown) + 1)]
    return Section(
        note="The best length of a round is the number of candidates that the target would accept."
        " Rounds that the output's end cuts are left out.",
        svg=lines_svg(
            "Best draft length, round by round",
            f"the candidates that the target would accept; {prompts}, {draft}",
            [
                SvgLine("best of the round", DRAFT_COLOURS[0], places, shown),
                SvgLine(f"best fixed, {fixed}", MUTED, places, [fixed] * len(places), "5 3"),
            ],
            ("round", "candidates"),
            {float(place): str(place) for place in places if place == 1 or place % 10 == 0},
        ),
        shown=cells.texts(rows),
    )


def _fixed(table: pd.DataFrame) -> Iterator[tuple[str, str, int, pd.DataFrame]]:
    for (prompts, draft, _), rows in table.groupby(["prompts", "draft", "fixed"], sort=False):
        yield str(prompts), str(draft), int(rows["fixed"].iloc[0]), rows


def phrases(table: pd.DataFrame) -> Section:
    """How often phrases come again, by their length: a row a set, draft, call, and what phrases are
    of; lines of the first set and draft."""
    groups = ["prompts", "draft", "call", "of"]
    wide = table.pivot_table("share", groups, "tokens", sort=False).reset_index()
    first = table[["prompts", "draft"]].iloc[0]
    drawn = table[(table["prompts"] == first["prompts"]) & (table["draft"] == first["draft"])]
    sizes = sorted(set(table["tokens"]))
    return Section(
        note="The share of the calls after which a phrase of n tokens comes again that an"
        " earlier round drafted after the same token: of all that was drafted, and of what was"
        " rejected alone.",
        svg=lines_svg(
            "Phrases of earlier rounds that come again",
            f"share of the calls, by the tokens of a phrase; {first['prompts']}, {first['draft']}",
            lines_of(drawn, "tokens", "share", ("call", "of"), OTHER_COLOURS),
            ("tokens of a phrase", "share of the calls"),
        ),
        shown=cells.table(
            wide,
            {
                **SET,
                "after a": cells.text("call"),
                "phrases": cells.text("of"),
                **{f"{n} token{'s' * (n > 1)}": cells.number(n, ".0%") for n in sizes},
            },
        ),
        ruled=cells.group_ends(zip(wide["prompts"], wide["draft"], strict=True)),
    )


def confidences(table: pd.DataFrame) -> Section:
    """The share accepted as a whole over the product of confidences, a line a set and draft."""
    lines = lines_of(table, "product", "acceptance", ("prompts", "draft"))
    lines.append(SvgLine("the product itself", MUTED, [0.0, 1.0], [0.0, 1.0], "2 3"))
    wide = table.pivot_table("acceptance", ["prompts", "draft"], "low", sort=False).reset_index()
    lows = sorted(set(table["low"]))
    return Section(
        note=f"Drafts of up to {post_use.LONGEST} tokens from everywhere, in ranges of the"
        " product.",
        svg=lines_svg(
            "Acceptance of whole drafts by the product of confidences",
            "share accepted as a whole; means of ranges",
            lines,
            ("product of confidences", "accepted"),
            {place / 10: f"{place / 10:g}" for place in range(0, 11, 2)},
        ),
        shown=cells.table(
            wide, {**SET, **{f"from {low:.1f}": cells.number(low, ".0%") for low in lows}}
        ),
    )


def components(table: pd.DataFrame) -> Section:
    """A row a component, and how much was recycled meanwhile."""
    first = table.iloc[0]
    tokens, drafted, recycled, suffixes = (
        int(first[name]) for name in ("tokens", "drafted", "recycled", "suffixes")
    )
    return Section(
        note="Live, one request at a time: milliseconds of a call, calls in a mean round, and the"
        " share of the time of all rounds but each request's first.",
        lines=[
            f"Of {drafted:,} drafted tokens, {recycled:,} ({recycled / max(drafted, 1):.0%}) were"
            f" cached phrases and took no draft call; of {tokens:,} tokens of the output,"
            f" {suffixes:,} ({suffixes / max(tokens, 1):.0%}) were cached phrases behind a draft."
        ],
        shown=cells.table(table, COMPONENTS),
    )


POST_USE = (
    Exhibit("post-use-f2a", ("greedy", TIMES), post_use.rounds, lengths, verdicts.post_use_f2a),
    Exhibit("post-use-f2b", ("greedy",), post_use.phrases, phrases, verdicts.post_use_f2b),
    Exhibit("post-use-f2c", ("greedy",), post_use.confidences, confidences, verdicts.post_use_f2c),
    Exhibit("post-use-9", ("greedy",), post_use.components, components, verdicts.post_use_9),
)
