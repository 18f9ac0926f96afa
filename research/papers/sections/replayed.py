"""Sections of several papers, with rounds that are replayed on recordings or decoded anew."""

from __future__ import annotations

import pandas as pd

from dashboards import cells
from dashboards.look import DRAFT_COLOURS
from dashboards.sections import Section
from research.papers import banditspec, replayed
from research.papers.sections import verdicts
from research.papers.sections.section import Exhibit
from research.papers.studies import OWN_HEADS, PAIR, TIMES
from research.svg import SvgBar, bars_svg, lines_of, lines_svg

TIMED = ("greedy", TIMES)
SET = {"prompts": cells.text("prompts")}


def policies(table: pd.DataFrame) -> Section:
    """The best of each family, beside the oracle."""
    sets = dict(zip(dict.fromkeys(table["recording"]), DRAFT_COLOURS, strict=False))
    bars = [
        SvgBar(f"{row['family'].replace('_', ' ')}, {row['recording']}", row["recording"],
               row["speedup"], row["speedup"], row["speedup"], f"{row['speedup']:.2f}×")
        for row in table.to_dict("records")
    ]  # fmt: skip
    return Section(
        note="The fastest configuration of each family; speedups are modelled (Eq. 3.1).",
        svg=bars_svg(
            "The best of each family of length policies",
            "modelled speedup over autoregressive decoding",
            bars,
            sets,
            one=True,
        ),
        shown=cells.table(
            table,
            {
                "prompts": cells.text("recording"),
                "family": lambda row: row["family"].replace("_", " "),
                "best configuration": cells.text("configuration"),
                "speedup": cells.number("speedup", ".2f×"),
                "over best fixed K": cells.number("over_fixed", "+.1%"),
                "of the oracle's": cells.number("of_oracle", ".1%"),
                "discard rate": cells.number("discard_rate", ".3f"),
                "verific. rate": cells.number("verification_rate", ".3f"),
            },
        ),
        ruled=cells.group_ends(table["recording"]),
    )


def regret(table: pd.DataFrame) -> Section:
    """MAT and regret of bandits and their arms."""
    return Section(
        note="Regret in rounds, stopping-time: against the arm that is best for all prompts, and"
        " against the best for each prompt, i*(pt, ν). The regret against each prompt's"
        " best is what Theorems 1 and 2 bound: the bound is their order for each prompt, summed,"
        " with 1 for the constant that they leave out. The lower bound is the proposition's for"
        " truncated geometric lengths (Eq. 1), as lengths go to infinity. They cover neither"
        " bandits that continue to learn nor rewards by time.",
        shown=cells.table(
            table,
            {
                **SET,
                "": cells.text("name"),
                "MAT": cells.number("mat", ".2f"),
                "regret": cells.number("regret_rounds", ",.0f"),
                "against each prompt's best": cells.number("each_rounds", ",.0f"),
                "rounds of the best arm": cells.count("best_rounds"),
                "lower bound": cells.number("lower", ",.0f"),
                "order of the bound": cells.number("bound", ",.0f"),
            },
        ),
        ruled=cells.group_ends(table["prompts"]),
    )


def together(table: pd.DataFrame) -> Section:
    """Draft lengths, and bandits over them."""
    return Section(
        note=f"{banditspec.SLOTS} requests at once, drafts of {table['draft'][0]}.",
        shown=cells.table(
            table,
            {
                "": cells.text("name"),
                "MAT": cells.number("mat", ".2f"),
                "tokens/s": cells.number("tokens_per_second", ".1f"),
                "over the best length": cells.ratio("over_best", "low", "high"),
                "regret": cells.number("regret_rounds", "+.0f"),
            },
        ),
        ruled=cells.group_ends(table["kind"]),
    )


def trees(table: pd.DataFrame) -> Section:
    best = table.groupby("prompts")["mat"].idxmax()
    return Section(
        note="α: accepted path over depth.",
        shown=cells.table(
            table,
            {
                **SET,
                "k-configuration": cells.text("shape"),
                "nodes": cells.count("nodes"),
                "α": cells.number("path_rate", ".2f"),
                "MAT": cells.number("mat", ".2f"),
                "modelled speedup": cells.number("speedup", ".2f×"),
            },
        ),
        marked=[int(row) for row in best],
        legend="Bold: the most tokens a round of a set.",
        ruled=cells.group_ends(table["prompts"]),
    )


def ranks(table: pd.DataFrame) -> Section:
    wide = table.pivot(index=["prompts", "draft"], columns="rank", values="share").reset_index()
    places = {str(n): cells.number(n, ".1%") for n in range(1, replayed.RANKS + 1)}
    return Section(
        note="How often the target's token has this rank in the draft's distribution.",
        svg=lines_svg(
            "The rank of the target's token in the draft's distribution",
            "share of places",
            lines_of(table, "rank", "share", ("prompts", "draft")),
            ("rank", "share"),
        ),
        shown=cells.table(wide, {**SET, "draft": cells.text("draft"), **places}),
    )


REPLAYED = (
    Exhibit(
        "specdecpp-oracle",
        (*TIMED, OWN_HEADS),
        replayed.policies,
        policies,
        verdicts.specdecpp_oracle,
        version=2,
    ),
    Exhibit(
        "banditspec-regret", TIMED, replayed.regret, regret, verdicts.banditspec_regret, version=5
    ),
    Exhibit(
        "banditspec-batch",
        ("greedy", PAIR),
        banditspec.together,
        together,
        verdicts.banditspec_batch,
    ),
    Exhibit("mcsd-trees", TIMED, replayed.trees, trees, verdicts.mcsd_trees),
    Exhibit("mcsd-ranks", ("greedy",), replayed.ranks, ranks, verdicts.mcsd_ranks),
)
