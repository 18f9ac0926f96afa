"""The verdicts on the plan's tables: a sentence under each, whether the paper's result holds here,
with both numbers and the measured reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from statistics import median
from typing import NamedTuple

import numpy as np

from dashboards import cells
from research.papers.figures import QUANTITIES
from research.papers.plan import Claim, Method, Scalar
from research.papers.result import Measured, PapersResult
from specdec_core.tokens.statistics import Ratio

VERDICT = "Verdict"
FITS = 0.98  # R², as in SpecDec++
DEVIATES = 0.062  # of throughputs, as in SpecDec++


def verdict(good: Iterable[bool], sentence: str) -> str:
    """The sentence, after whether all, some or none of the comparisons are `good`."""
    held = [bool(each) for each in good]
    if not held:
        return f"Not measured here: {sentence}"
    if all(held):
        return f"Holds here: {sentence}"
    if any(held):
        return f"Holds partly ({sum(held)} of {len(held)}): {sentence}"
    return f"Does not hold here: {sentence}"


def between(values: Iterable[float], form: str) -> str:
    """The least and the greatest of some values that are known."""
    known = [value for value in values if not np.isnan(value)]
    ends = [cells.as_number(end(known), form) for end in (min, max)] if known else [cells.NONE]
    return "–".join(dict.fromkeys(ends))


class BestOfSides(NamedTuple):
    """The best of both sides of a claim under the same conditions, by the claim's quantity; with
    `chosen`, of several on these prompts."""

    ours: Measured
    theirs: Measured
    chosen: bool = False

    @property
    def ratio(self) -> Ratio | None:
        """How many times as fast, where both were timed."""
        ours, theirs = self.ours.timing, self.theirs.timing
        return ours.over(theirs) if ours and theirs else None


def table_verdict(result: PapersResult, key: str) -> str:
    """The verdict on a table: its claim's, or that of one of :data:`OTHERS`; empty where the plan
    claims nothing."""
    if key in OTHERS:
        return OTHERS[key](result)
    claim = result.plan.tables[key].claim
    return "" if claim is None else _claimed(result, key, claim)


def _claimed(result: PapersResult, key: str, claim: Claim) -> str:
    sides = [" / ".join(name.rstrip("*=, K") or name for name in side)
             for side in (claim.of, claim.over)]  # fmt: skip
    pairs = list(_pairs(result, key, claim))
    if not pairs:
        return verdict([], f"{sides[0]} or {sides[1]} is not among the rows.")
    look = QUANTITIES[claim.quantity]
    ours = [pair.ours.metrics[claim.quantity] for pair in pairs]
    theirs = [pair.theirs.metrics[claim.quantity] for pair in pairs]
    values = f"{between(ours, look.form)} against {between(theirs, look.form)} of {sides[1]}"
    ratios = [ratio for pair in pairs if (ratio := pair.ratio)]
    good = [a > b for a, b in zip(ours, theirs, strict=True)]
    text = f"{sides[0]} has {look.heading} {values}"
    if ratios:
        times = between((ratio.value for ratio in ratios), ".2f×")
        ties = sum(ratio.tied for ratio in ratios)
        text += f", {times} as fast ({ties} of {len(ratios)} tied)"
        if claim.quantity == "speedup":
            good = [ratio.low > 1 for ratio in ratios]
    if any(pair.chosen for pair in pairs):
        text += ", the best of each chosen on these prompts"
    return verdict(good, f"{text}; paper: {claim.paper}; measured reason: {_reason(pairs)}.")


def _pairs(result: PapersResult, key: str, claim: Claim) -> Iterator[BestOfSides]:
    """The best of both sides in each prompt set, sampling and, where a table has several, draft and
    varied value."""
    table, quantity = result.plan.tables[key], claim.quantity
    for prompts in result.sets_of(table):
        known: dict[tuple[object, ...], tuple[list[Measured], list[Measured]]] = {}
        for number, row in enumerate(table.rows):
            sides = [
                side for side, names in enumerate((claim.of, claim.over))
                if any(fnmatchcase(row.name, name) for name in names)
            ]  # fmt: skip
            for method in result.plan.lines(key, number) if sides else ():
                for value, configuration in zip(table.values, method.configurations, strict=True):
                    found = result.find(prompts, configuration)
                    if found is None or quantity not in found.metrics:
                        continue
                    draft = configuration.draft if table.each_draft else None
                    group = known.setdefault((configuration.sampling, draft, value), ([], []))
                    group[sides[0]].append(found)
        for group in known.values():
            if all(group):
                ours, theirs = (max(side, key=lambda m: m.metrics[quantity]) for side in group)
                yield BestOfSides(ours, theirs, max(map(len, group)) > 1)


def _reason(pairs: list[BestOfSides]) -> str:
    """Tokens a round and, where both were timed, milliseconds a round: a speed is their ratio."""
    ours, theirs = [pair.ours for pair in pairs], [pair.theirs for pair in pairs]
    tokens = [median(each.metrics["mat"] for each in side) for side in (ours, theirs)]
    text = f"tokens a round {tokens[0]:.2f} against {tokens[1]:.2f}"
    if all(each.timing for each in (*ours, *theirs)):
        rounds = [median(map(_round_milliseconds, side)) for side in (ours, theirs)]
        text += f", ms a round {rounds[0]:.2f} against {rounds[1]:.2f}"
    return text


def _round_milliseconds(measured: Measured) -> float:
    assert measured.timing is not None
    seconds = sum(measured.timing.tokens) / measured.timing.tokens_per_second
    return 1e3 * seconds / max(measured.counts["n_target"], 1)


def forwards_verdict(result: PapersResult, key: str) -> str:
    """The verdict on forward times by regression."""
    times, found = result.forward_times(key), result.throughputs(key)
    known = times[times["refused"] == ""]
    errors = f"off by {between(found['error'], '.1%')}" if len(found) else "unknown"
    return verdict(
        [*(times["r2"] >= FITS), *(found["error"] <= DEVIATES if len(found) else ())],
        f"R² {between(known['r2'], '.3f')} and predicted throughputs {errors} (paper at"
        f" least {FITS:g} and at most {DEVIATES:.1%}); measured reason: single decodings of"
        f" {times['decodings'].min()} to {times['decodings'].max()}, and"
        f" {len(times) - len(known)} of {len(times)} fits do not determine the times.",
    )


def _best_lengths(result: PapersResult) -> str:
    """Post-use, Fig. 5: the best λ differs by draft and task."""
    table, best = result.plan.tables["post-use-f5"], []
    for method in result.plan.methods("post-use-f5"):
        for prompts in result.sets_of(table):
            values = [result.value(prompts, c, "speedup") for c in method.configurations]
            if not np.isnan(values).all():
                place = int(np.nanargmax(values))
                best.append((table.values[place], values[place]))
    lengths = sorted({length for length, _ in best}, key=lambda value: float(value or 0))
    return verdict(
        [len(lengths) > 1] if best else [],
        f"the best λ is {', '.join(map(str, lengths))} over {len(best)} drafts and sets (paper: it"
        f" differs, a drawing); measured reason: there it makes"
        f" {between((value for _, value in best), '.2f×')}.",
    )


def _by_draft(result: PapersResult) -> str:
    """Improving MCSD, Table 4: a larger draft model's α is higher."""
    rates: dict[str | None, list[float]] = {}
    for method in result.plan.methods("mcsd-4"):
        for prompts in result.sets_of(result.plan.tables["mcsd-4"]):
            for c in method.configurations:
                rates.setdefault(c.draft, []).append(result.value(prompts, c, "path_rate"))
    if len(rates) < 2:
        return verdict([], "the pair has one draft model.")
    small, large, *_ = rates.values()
    return verdict(
        [a < b for a, b in zip(small, large, strict=True)],
        f"α is {between(small, '.2f')} with the first draft and {between(large, '.2f')} with the"
        " second (paper 0.74–0.91 small, 0.92–0.96 large, its trees begun by the target); measured"
        f" reason: the second is the larger draft, {np.nanmean(large) - np.nanmean(small):+.2f} in"
        " the mean.",
    )


def _timed(result: PapersResult, key: str, method: Method) -> dict[Scalar | None, Measured]:
    """What was timed of a method on its table's first prompt set, by the varied value."""
    table = result.plan.tables[key]
    [prompts, *_] = result.sets_of(table)
    found = [result.find(prompts, configuration) for configuration in method.configurations]
    return {v: each for v, each in zip(table.values, found, strict=True) if each and each.timing}


def _best_tree(result: PapersResult) -> str:
    """Improving MCSD, Fig. 4: the fastest k-configuration."""
    known = {
        (method.name, value): each
        for method in result.plan.methods("mcsd-f4")
        for value, each in _timed(result, "mcsd-f4", method).items()
    }
    place = max(known, key=lambda each: known[each].metrics["speedup"])
    best, papers = known[place], known.get(("a = 4", 3), known[place])
    return verdict(
        [place == ("a = 4", 3)],
        f"{place[0]}, b = {place[1]} is the fastest, {best.metrics['speedup']:.2f}×; the paper's"
        f" a = 4, b = 3 has {papers.metrics['speedup']:.2f}×; measured reason:"
        f" {_reason([BestOfSides(best, papers)])}.",
    )


def _widths(result: PapersResult) -> str:
    """Improving MCSD, Fig. 6: α rises with the width and then stays, and so does the speed."""
    values = result.plan.tables["mcsd-f6"].values
    [first] = [m for m in result.plan.methods("mcsd-f6") if m.name == "Without"]
    known = _timed(result, "mcsd-f6", first)
    rates = [each.metrics["path_rate"] for each in known.values()]
    best = max(known, key=lambda w: known[w].metrics["speedup"])
    widest = known[max(known, key=lambda value: float(value or 0))]
    return verdict(
        [rates[-1] > rates[0], best not in (values[0], values[-1])],
        f"α rises from {rates[0]:.2f} to {rates[-1]:.2f} (paper: to 0.75 at W = 12), and W = {best}"
        f" is the fastest, {known[best].metrics['speedup']:.2f}× (paper: W = 10); measured reason:"
        f" {_reason([BestOfSides(known[best], widest)])} at the greatest width.",
    )


OTHERS = {
    "post-use-f5": _best_lengths,
    "mcsd-4": _by_draft,
    "mcsd-f4": _best_tree,
    "mcsd-f6": _widths,
}
