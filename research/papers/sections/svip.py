"""SVIP's figures and tables that recordings hold."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from dashboards import cells
from dashboards.look import ARM_COLOURS, DRAFT_COLOURS, INK, style
from dashboards.sections import Section
from research.papers import svip
from research.papers.sections import verdicts
from research.papers.sections.section import PaperSection
from research.papers.studies import LONG_FORM, LONG_FORM_GREEDY, TIMES, Study
from research.svg import SvgLine, lines_svg

PAPER = "SVIP"
BOTH = ("greedy", "sampled")
COLOURS = {
    "Constant, K=5": style("fixed").colour,
    "Heuristic": style("heuristic").colour,
    "SVIP, h=0.3": style("svip").colour,
    "SVIP, h=1.2": style("confidence").colour,
    svip.ORACLE: INK,
}
SET = {"prompts": cells.text("prompts"), "sampling": cells.text("sampling")}
DASHES = {"greedy": "", "T=1": "5 3"}
SETTING = (
    "the pair's first draft; texts of the prompt sets named, as long as the tables', greedy and"
    " sampled at temperature 1"
)
LONG = "texts continued to the last context, coupled, timed interleaved"
POLICY = {
    "policy": cells.text("policy"),
    "drafted a round": cells.number("drafted", ".2f"),
    "accepted": cells.number("accepted", ".1%"),
}


def oracle_lengths(table: pd.DataFrame) -> Section:
    """The variance over context, a line a set."""
    lines = [
        SvgLine.of(name, colour, each, "up_to", "variance", dash, ("variance_low", "variance_high"))
        for name, colour, dash, each in _by_set(table)
    ]
    return Section(
        note="An oracle drafts what will be accepted, and no more; context counts the prompt.",
        svg=lines_svg(
            "The variance of the oracle's draft length",
            "tokens², with 95 % intervals over prompts",
            lines,
            ("context up to, tokens", "variance"),
            {float(edge): str(edge) for edge in sorted(set(table["up_to"])) if edge != 64},
        ),
        shown=cells.table(
            table,
            {
                **SET,
                "context up to": cells.count("up_to"),
                "rounds": cells.count("rounds"),
                "mean": cells.number("mean", ".2f"),
                "variance": cells.interval("variance", ".1f"),
            },
        ),
    )


def entropies(table: pd.DataFrame) -> Section:
    return Section(
        note="The draft's mean entropy, nats.",
        shown=cells.table(
            table,
            {
                **SET,
                "accepted": cells.number("accepted", ".2f"),
                "rejected": cells.number("rejected", ".2f"),
                "tokens accepted": cells.count("n_accepted"),
                "rejected ": cells.count("n_rejected"),
            },
        ),
    )


def divergences(table: pd.DataFrame) -> Section:
    """KL over the place before a rejection."""
    lines = [
        SvgLine.of(name, colour, each, "offset", "kl", dash)
        for name, colour, dash, each in _by_set(table)
    ]
    wide = table.pivot(index=["prompts", "sampling", "rejections"], columns="offset", values="kl")
    places = {str(n) if n else "rejected": cells.number(n, ".2f") for n in range(-svip.BEFORE, 1)}
    return Section(
        note="Mean KL(q‖p), nats, at rejected tokens and at the four accepted ones before them.",
        svg=lines_svg(
            "Divergence before a rejection",
            "mean KL(q‖p)",
            lines,
            ("tokens from the rejected one", "nats"),
        ),
        shown=cells.table(
            wide.reset_index(), {**SET, **places, "rejections": cells.count("rejections")}
        ),
    )


def sorted_probabilities(table: pd.DataFrame) -> Section:
    """Log probability over rank, accepted and rejected, of the sampled texts."""
    shown = table[table["sampling"] != "greedy"]
    lines = [
        SvgLine.of(
            f"{name}, {outcome}", colour, each, "rank", "log_probability",
            "" if outcome == "accepted" else "5 3",
        )
        for (name, colour) in _colours(shown["prompts"])
        for outcome, each in shown[shown["prompts"] == name].groupby("outcome")
    ]  # fmt: skip
    firsts = table[table["rank"].isin((1, 2, 10))]
    wide = firsts.pivot(
        index=["prompts", "sampling", "outcome"], columns="rank", values="log_probability"
    )
    ranks = {f"rank {n}": cells.number(n, ".2f") for n in wide.columns}
    return Section(
        note="Mean log probability of the draft's most likely tokens, by rank.",
        svg=lines_svg(
            "The draft's distribution at accepted and rejected tokens",
            "mean log probability by rank, sampled",
            lines,
            ("rank", "log probability"),
            zero=False,
        ),
        shown=cells.table(
            wide.reset_index(), {**SET, "candidates": cells.text("outcome"), **ranks}
        ),
    )


def bounds(table: pd.DataFrame) -> Section:
    """The bounds over positions sorted by acceptance, of the first set."""
    first = table[table["prompts"] == table["prompts"].iloc[0]]
    curves = {
        "β (Eq. 1)": ("beta", INK, ""),
        "Pinsker (Eq. 4)": ("oracle_bound", style("fixed").colour, ""),
        "Bretagnolle–Huber (Eq. 12)": ("huber_bound", style("heuristic").colour, ""),
        "1 − √(0.18 H) (Eq. 6)": ("approximation", style("svip").colour, "5 3"),
    }
    means = table.groupby(["prompts", "sampling"], sort=False, as_index=False).mean()
    return Section(
        note="Positions sorted by acceptance probability; the table has the means over all.",
        svg=lines_svg(
            "Acceptance probability and its lower bounds",
            f"{first['prompts'].iloc[0]}, sampled; means of equal parts",
            [
                SvgLine.of(name, colour, first, "share", column, dash)
                for name, (column, colour, dash) in curves.items()
            ],
            ("positions sorted by β", "probability"),
            {0.0125: "0", 0.5: "50 %", 0.9875: "100 %"},
        ),
        shown=cells.table(
            means,
            {
                **SET,
                "β": cells.number("beta", ".2f"),
                "Pinsker": cells.number("oracle_bound", ".2f"),
                "Bretagnolle–Huber": cells.number("huber_bound", ".2f"),
                "1 − √(0.18 H)": cells.number("approximation", ".2f"),
                "the last is below β": cells.number("holds", ".1%"),
            },
        ),
    )


def ratio_fits(table: pd.DataFrame) -> Section:
    """How often the approximation is a bound, measured and by both fits."""
    first = table[table["prompts"] == table["prompts"].iloc[0]]
    curves = {
        "measured": ("measured", INK, ""),
        "Gaussian (Eq. 14)": ("gaussian", style("fixed").colour, "5 3"),
        "Gamma (Eq. 15)": ("gamma", style("svip").colour, "5 3"),
    }
    return Section(
        note="γ is the cross entropy over the entropy. The approximation is below Pinsker's bound"
        " where γ ≤ 2c + 1.",
        svg=lines_svg(
            "How often the approximation is a bound",
            f"{first['prompts'].iloc[0]}, sampled",
            [
                SvgLine.of(name, colour, first, "c", column, dash)
                for name, (column, colour, dash) in curves.items()
            ],
            ("c", "share of positions"),
            {c: f"{c:g}" for c in (0.18, 0.5, 1.0, 2.0)},
        ),
        shown=cells.table(
            table,
            {
                **SET,
                "c": cells.number("c", "g"),
                "measured": cells.number("measured", ".1%"),
                "Gaussian": cells.number("gaussian", ".1%"),
                "Gamma": cells.number("gamma", ".1%"),
                "μ, σ": lambda row: f"{row['mean']:.2f}, {row['deviation']:.2f}",
                "α, β": lambda row: f"{row['shape']:.2f}, {row['rate']:.2f}",
            },
        ),
    )


def lengths_by_context(table: pd.DataFrame) -> Section:
    """Drafted tokens over context, a line a policy."""
    return Section(
        svg=lines_svg(
            "Drafted tokens by context",
            "mean of a round",
            [
                SvgLine.of(name, COLOURS[name], each, "up_to", "drafted")
                for name, each in _by_policy(table)
            ],
            ("context up to, tokens", "tokens"),
        ),
        shown=cells.table(
            table,
            {
                **SET,
                "context up to": cells.count("up_to"),
                "rounds": cells.count("rounds"),
                **POLICY,
            },
        ),
        ruled=cells.group_ends(table["policy"]),
    )


def lengths(table: pd.DataFrame) -> Section:
    return Section(
        note="Δ is drafted minus oracle's tokens, at the oracle's rounds of Fig. 1.",
        shown=cells.table(
            table,
            {
                **SET,
                **POLICY,
                "MAT": cells.number("mat", ".2f"),
                "mean Δ": cells.number("delta", "+.2f"),
                "mean |Δ|": cells.number("distance", ".2f"),
                "Δ = 0": cells.number("exact", ".1%"),
            },
        ),
        ruled=cells.group_ends(zip(table["prompts"], table["sampling"], strict=True)),
    )


def long_texts(table: pd.DataFrame) -> Section:
    """The speedup so far over context, a line a configuration."""
    _, *names = dict.fromkeys(table["configuration"])  # the first is autoregressive decoding
    wide = table.pivot(index="configuration", columns="up_to", values="so_far").loc[names]
    lines = [
        SvgLine.of(
            name,
            colour,
            table[table["configuration"] == name],
            "up_to",
            "so_far",
            ends=("so_far_low", "so_far_high"),
        )
        for name, colour in zip(names, ARM_COLOURS, strict=False)
    ]
    return Section(
        note="Times as fast as autoregressive decoding, from a text's beginning to each context.",
        svg=lines_svg(
            "Speedup by context",
            "over autoregressive decoding, with 95 % intervals over texts",
            lines,
            ("context, tokens", "times as fast"),
        ),
        shown=cells.table(
            wide.reset_index(),
            {
                "": cells.text("configuration"),
                **{f"to {edge:,}": cells.number(edge, ".2f×") for edge in wide.columns},
            },
        ),
    )


def example(table: pd.DataFrame) -> Section:
    """Drafted tokens over the rounds of a text, a line a policy."""
    spread = table.groupby("policy", sort=False)["drafted"].agg(["mean", "std", "max"])
    return Section(
        svg=lines_svg(
            "Draft lengths in one text",
            f"the first rounds, {table['prompts'].iloc[0]}",
            [
                SvgLine.of(
                    name, COLOURS[name], each, "round", "drafted", "5 3" * (name == svip.ORACLE)
                )
                for name, each in _by_policy(table)
            ],
            ("round", "drafted tokens"),
            {float(n): str(n) for n in (1, 10, 20, 30, 40) if n <= table["round"].max()},
        ),
        shown=cells.table(
            spread.reset_index(),
            {
                "policy": cells.text("policy"),
                "mean": cells.number("mean", ".2f"),
                "standard deviation": cells.number("std", ".2f"),
                "longest": cells.count("max"),
            },
        ),
    )


def speedups(table: pd.DataFrame) -> Section:
    """A row a policy, a column a set, as the paper has them."""
    wide = table.pivot(index="policy", columns="prompts", values="speedup")
    sets, policies = list(dict.fromkeys(table["prompts"])), list(dict.fromkeys(table["policy"]))
    lengths = table.drop_duplicates("prompts").set_index("prompts")["tokens"]
    columns = {f"{name}, {lengths[name]:.0f} tokens": cells.number(name, ".2f×") for name in sets}
    return Section(
        note="Modelled (Eq. 3.1 of SpecDec++), by replay; a text's tokens in the mean.",
        shown=cells.table(
            wide.loc[policies].reset_index(), {"policy": cells.text("policy"), **columns}
        ),
        best=[
            (policies.index(wide[name].idxmax()), column)
            for column, name in enumerate(sets, start=1)
        ],
    )


def tokens(table: pd.DataFrame) -> Section:
    return Section(
        shown=cells.table(
            table,
            {
                "token": lambda row: (
                    f"`{row['token']}`" if row["token"] != "all tokens" else row["token"]
                ),
                "mean entropy": cells.number("entropy", ".2f"),
                "accepted": cells.number("accepted", ".2f"),
                "drafted": cells.count("count"),
            },
        ),
    )


def _by_set(table: pd.DataFrame) -> list[tuple[str, str, str, pd.DataFrame]]:
    """Name, colour, dash and rows of each set and sampling."""
    groups = []
    for name, colour in _colours(table["prompts"]):
        for sampling, each in table[table["prompts"] == name].groupby("sampling", sort=False):
            groups.append((f"{name}, {sampling}", colour, DASHES.get(str(sampling), ""), each))
    return groups


def _colours(names: Iterable[str]) -> list[tuple[str, str]]:
    return list(zip(dict.fromkeys(names), DRAFT_COLOURS, strict=False))


def _by_policy(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(str(name), each) for name, each in table.groupby("policy", sort=False)]


SVIP = (
    PaperSection(
        Study("svip-f1", (*BOTH, "long"), svip.oracle_lengths, version=2),
        PAPER,
        "Fig. 1",
        "The oracle's draft length by context",
        "the variance rises steeply with context, up to thousands of tokens (a drawing only).",
        f"{SETTING}, and the long ones, sampled.",
        oracle_lengths,
        verdict=verdicts.svip_f1,
    ),
    PaperSection(
        Study("svip-t1", BOTH, svip.entropies),
        PAPER,
        "Table 1",
        "The draft's entropy at accepted and rejected tokens",
        "0.25 and 1.30 (AIME, greedy), 2.18 and 3.99 (MT-Bench, sampled).",
        f"{SETTING}.",
        entropies,
        verdict=verdicts.svip_t1,
    ),
    PaperSection(
        Study("svip-f3a", BOTH, svip.divergence_before_rejections),
        PAPER,
        "Fig. 3a",
        "Divergence before a rejection",
        "it surges at the rejected token and gives no sign before (a drawing only).",
        f"{SETTING}; rejections with at least four accepted tokens before them.",
        divergences,
        verdict=verdicts.svip_f3a,
    ),
    PaperSection(
        Study("svip-f3b", BOTH, svip.sorted_probabilities),
        PAPER,
        "Fig. 3b",
        "Sorted probabilities at accepted and rejected tokens",
        "flatter at rejected tokens (a drawing only).",
        f"{SETTING}; the ten most likely tokens that recordings hold, not the vocabulary.",
        sorted_probabilities,
        verdict=verdicts.svip_f3b,
    ),
    PaperSection(
        Study("svip-f4", ("sampled",), svip.bounds, version=2),
        PAPER,
        "Fig. 4, Eqs. 1, 4 and 6",
        "The acceptance probability and its lower bounds",
        "with c = 0.18 the approximation lies between the bound and the truth in most cases.",
        "the pair's first draft, sampled at temperature 1; bounds below 0 count as 0.",
        bounds,
        verdict=verdicts.svip_f4,
    ),
    PaperSection(
        Study("svip-gamma", ("sampled",), svip.ratio_fits),
        PAPER,
        "Eqs. 9, 14 and 15",
        "γ by a Gaussian and by a Gamma",
        "no numbers: it says that c trades reliability for tightness.",
        "the pair's first draft, sampled at temperature 1.",
        ratio_fits,
        verdict=verdicts.svip_gamma,
    ),
    PaperSection(
        Study("svip-f5", (LONG_FORM,), svip.long_texts),
        PAPER,
        "Fig. 5",
        "Speedup by context",
        "SVIP above constant and heuristic lengths at every length to 8K, by up to 17 % over"
        " constant ones on MT-Bench.",
        f"{LONG}, at temperature 1. An EAGLE head's tree is the paper's Table 2, where SVIP makes"
        " 2.70× to 2.80× (128 tokens), 2.41× to 2.69× (1K) and 1.24× to 1.41× (4K).",
        long_texts,
        verdict=verdicts.svip_f5,
    ),
    PaperSection(
        Study("svip-t5", (LONG_FORM_GREEDY,), svip.long_texts),
        PAPER,
        "App. D, Table 5",
        "Speedup by context, greedy",
        "constant lengths 1.05× (128 tokens) to 1.67× (8K), heuristic ones 1.04× to 1.97×, SVIP"
        " 1.30× to 2.10×: greedy texts repeat themselves, which exaggerates all three.",
        f"{LONG}, greedy.",
        long_texts,
        verdict=verdicts.svip_t5,
    ),
    PaperSection(
        Study("svip-f6", ("long",), svip.lengths_by_context),
        PAPER,
        "Fig. 6",
        "Draft length and acceptance by context",
        "SVIP drafts less than both other policies, and more of it is accepted, at all lengths to"
        " 8K.",
        "long texts, sampled at temperature 1, by replay.",
        lengths_by_context,
        verdict=verdicts.svip_f6,
    ),
    PaperSection(
        Study("svip-f7", BOTH, svip.lengths, version=3),
        PAPER,
        "Fig. 7",
        "Draft lengths against the oracle's",
        "SVIP is off by less than 0.5 tokens on average; the other policies draft too much.",
        f"{SETTING}; by replay, rounds with room for 40 tokens.",
        lengths,
        verdict=verdicts.svip_f7,
    ),
    PaperSection(
        Study("svip-f8", ("long",), svip.example),
        PAPER,
        "Fig. 8",
        "Draft lengths in one text",
        "SVIP's lengths vary from round to round as the oracle's do; the other policies' do"
        " not (a drawing).",
        "one long text, sampled at temperature 1, by replay.",
        example,
        verdict=verdicts.svip_f8,
    ),
    PaperSection(
        Study("svip-t3", ("sampled", "long", TIMES), svip.speedups),
        PAPER,
        "Table 3, Fig. 7a",
        "Speedup by task",
        "SVIP 1.52× to 1.82×, constant lengths 1.25× (GPQA) to 1.58× (AIME), heuristic ones 1.18×"
        " to 1.34×, of QwQ-32B's reasoning, 1,300 to 6,200 tokens a text. Fig. 7a, a drawing, has"
        " SVIP above all constant lengths of 2 to 5.",
        "no model with reasoning of that length; the prompt sets named, sampled at temperature 1,"
        " and the long texts.",
        speedups,
        verdict=verdicts.svip_t3,
    ),
    PaperSection(
        Study("svip-t4", ("greedy",), svip.tokens),
        PAPER,
        "Table 4",
        "Tokens that are hard and easy to draft",
        "all tokens 0.38 and 0.68; “Wait” 1.17 and 0.53, “Alright” 1.38 and 0.22, “Actually” 1.52"
        " and 0.33; “)”, “}”, “ynomials”, “ponents” 0.01–0.12 and 1.00.",
        "all prompt sets together, greedy; of the tokens that were drafted 20 times, the"
        " least and the most often accepted.",
        tokens,
        verdict=verdicts.svip_t4,
    ),
)
