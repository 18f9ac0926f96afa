"""SVIP's figures and tables that recordings hold."""

from __future__ import annotations

import pandas as pd

from dashboards import cells
from dashboards.look import ARM_COLOURS, INK, style
from dashboards.sections import Section
from research.long_form.study import LongForm
from research.papers import svip
from research.papers.sections import verdicts
from research.papers.sections.section import Exhibit
from research.papers.studies import LONG_FORM, LONG_FORM_GREEDY, TIMES
from research.svg import SvgLine, lines_of, lines_svg

BOTH = ("greedy", "sampled")
COLOURS = {
    "Constant, K=5": style("fixed").colour,
    "Heuristic": style("heuristic").colour,
    "SVIP, h=0.3": style("svip").colour,
    "SVIP, h=1.2": style("confidence").colour,
    svip.ORACLE: INK,
}
SET = {"prompts": cells.text("prompts"), "sampling": cells.text("sampling")}
POLICY = {
    "policy": cells.text("policy"),
    "drafted a round": cells.number("drafted", ".2f"),
    "accepted": cells.number("accepted", ".1%"),
}


def oracle_lengths(table: pd.DataFrame) -> Section:
    """The variance over context, a line a set."""
    ends = ("variance_low", "variance_high")
    return Section(
        note="An oracle drafts what will be accepted, and no more; context counts the prompt.",
        svg=lines_svg(
            "The variance of the oracle's draft length",
            "tokens², with 95 % intervals over prompts",
            lines_of(table, "up_to", "variance", ("prompts", "sampling"), ends=ends),
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
    wide = table.pivot(index=["prompts", "sampling", "rejections"], columns="offset", values="kl")
    places = {str(n) if n else "rejected": cells.number(n, ".2f") for n in range(-svip.BEFORE, 1)}
    return Section(
        note="Mean KL(q‖p), nats, at rejected tokens and at the four accepted ones before them.",
        svg=lines_svg(
            "Divergence before a rejection",
            "mean KL(q‖p)",
            lines_of(table, "offset", "kl", ("prompts", "sampling")),
            ("tokens from the rejected one", "nats"),
        ),
        shown=cells.table(
            wide.reset_index(), {**SET, **places, "rejections": cells.count("rejections")}
        ),
    )


def sorted_probabilities(table: pd.DataFrame) -> Section:
    """Log probability over rank, accepted and rejected, of the sampled texts."""
    shown = table[table["sampling"] != "greedy"]
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
            lines_of(shown, "rank", "log_probability", ("prompts", "outcome")),
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
            _curves(first, "share", curves),
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
            _curves(first, "c", curves),
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


def _curves(frame: pd.DataFrame, x: str, columns: dict[str, tuple[str, str, str]]) -> list[SvgLine]:
    """A line over `x` for each name: of a column, in a colour, with a dash."""
    return [SvgLine.of(n, colour, frame, x, y, dash) for n, (y, colour, dash) in columns.items()]


def lengths_by_context(table: pd.DataFrame) -> Section:
    """Drafted tokens over context, a line a policy."""
    return Section(
        svg=lines_svg(
            "Drafted tokens by context",
            "mean of a round",
            lines_of(table, "up_to", "drafted", ("policy",), COLOURS),
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
    """Fig. 5 and Table 5: the speedup so far over context, a line a configuration."""
    _, *names = dict.fromkeys(table["configuration"])  # the first is autoregressive decoding
    drawn = table[table["configuration"].isin(names)]
    few = drawn["so_far_low"].isna().any()
    ends = () if few else ("so_far_low", "so_far_high")
    wide = drawn.pivot(index="configuration", columns="up_to", values="so_far").loc[names]
    return Section(
        note="Times as fast as autoregressive decoding, from a text's beginning to each context.",
        svg=lines_svg(
            "Speedup by context",
            "over autoregressive decoding, "
            + ("of too few texts for intervals" if few else "with 95 % intervals over texts"),
            lines_of(drawn, "up_to", "so_far", ("configuration",), ARM_COLOURS, ends),
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
            lines_of(table, "round", "drafted", ("policy",), COLOURS),
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
        )
    )


SVIP = (
    Exhibit(
        "svip-f1", (*BOTH, "long"), svip.oracle_lengths, oracle_lengths, verdicts.svip_f1, version=2
    ),
    Exhibit("svip-t1", BOTH, svip.entropies, entropies, verdicts.svip_t1),
    Exhibit("svip-f3a", BOTH, svip.divergence_before_rejections, divergences, verdicts.svip_f3a),
    Exhibit("svip-f3b", BOTH, svip.sorted_probabilities, sorted_probabilities, verdicts.svip_f3b),
    Exhibit("svip-f4", ("sampled",), svip.bounds, bounds, verdicts.svip_f4, version=2),
    Exhibit("svip-gamma", ("sampled",), svip.ratio_fits, ratio_fits, verdicts.svip_gamma),
    *(
        Exhibit(key, (texts,), LongForm.table, long_texts, verdicts.svip_f5, version=2)
        for key, texts in (("svip-f5", LONG_FORM), ("svip-t5", LONG_FORM_GREEDY))
    ),
    Exhibit("svip-f6", ("long",), svip.lengths_by_context, lengths_by_context, verdicts.svip_f6),
    Exhibit("svip-f7", BOTH, svip.lengths, lengths, verdicts.svip_f7, version=3),
    Exhibit("svip-f8", ("long",), svip.example, example, verdicts.svip_f8),
    Exhibit("svip-t3", ("sampled", "long", TIMES), svip.speedups, speedups, verdicts.svip_t3),
    Exhibit("svip-t4", ("greedy",), svip.tokens, tokens, verdicts.svip_t4),
)
