"""The papers' tables in our terms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, product
from operator import itemgetter
from statistics import median
from typing import NamedTuple

import pandas as pd

from dashboards import cells
from dashboards.reports.sentences import sentences, tooltip
from dashboards.sections import Report, ReportOrigin, Section, metric_name
from research.papers.figures import QUANTITIES, paper_svg
from research.papers.plan import Method, Quantity, Table
from research.papers.result import PapersResult
from research.papers.table_verdicts import VERDICT, forwards_verdict, table_verdict
from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.bandit.settings import BanditSettings

LESS_IS_BETTER = ("discard_rate", "verification_rate")
FORWARDS = {
    "prompts": cells.text("prompts"),
    "setting": cells.text("setting"),
    "t_draft, ms": cells.milliseconds("t_draft"),
    "t_target, ms": cells.milliseconds("t_target"),
    "R²": cells.number("r2", ".4f"),
    "decodings": cells.count("decodings"),
    "not determined": cells.text("refused"),
}
MOST_COLUMNS = 6  # on a console
LEGEND = (
    "Bold: the best of its column among lossless methods; “=” before a ratio: cannot be told from "
    "the fastest (the 95 % interval of the paired ratio includes 1); “(lossy)”: the output does "
    "not keep the target's distribution."
)


def report(result: PapersResult) -> Report:
    """Every table that has a prompt set left, and what they say."""
    methods = [m for key in result.tables() for m in result.plan.methods(key)]
    lossy = dict.fromkeys(method.name for method in methods if not method.lossless)
    sets = result.sets
    return Report(
        command="papers",
        title="The papers' tables in our terms",
        origin=ReportOrigin(
            name=result.name,
            pair=result.pair.name,
            notes=notes(result),
            params={
                "pair": result.pair.model_dump(mode="json"),
                "prompts": {n: {"source": s.source, "count": s.count} for n, s in sets.items()},
                "max_new_tokens": result.plan.max_new_tokens,
                "repeats": result.plan.repeats,
            },
            started=result.started,
            facts=result.environment,
        ),
        findings=findings(result),
        parts=[*tables(result), sentences(_named(result), "What the methods do", on_console=False)],
        metrics=dict(_metrics(result)),
        tags={
            "lossy": ", ".join(lossy) or "none",
            **{f"prompts.{name}": prompts.digest for name, prompts in sets.items()},
            **result.environment,
        },
    )


def findings(result: PapersResult) -> list[str]:
    """For each prompt set the fastest lossless configuration of greedy decoding, and how it
    compares with the best plain chain. What a table says stands in its verdict."""
    lines = []
    for prompts in result.sets:
        timings = {
            m.configuration: m.timing
            for m in result.measured
            if m.prompts == prompts and m.timing and m.configuration.drafter
            if m.configuration.sampling.greedy and m.configuration.lossless
        }
        by_speed = sorted(timings, key=lambda each: -timings[each].tokens_per_second)
        if not by_speed:
            continue
        best, timing = by_speed[0], timings[by_speed[0]]
        speedup = cells.as_ratio(timing.speedup, timing.low, timing.high)
        line = f"{prompts}: fastest is {_name_of(result, prompts, best)}, {speedup}"
        line += " autoregressive decoding"
        chain = next((each for each in by_speed if each.family == "fixed"), best)
        if chain is not best:
            ratio = cells.of_ratio(timing.over(timings[chain]))
            line += f" and {ratio} the best plain chain ({chain.label})"
        if len(by_speed) > 1:
            line += ", chosen on these prompts"
        lines.append(f"{line}.")
    return lines


def _against(result: PapersResult, key: str) -> Iterator[str]:
    """How the rows below a table's `against` compare with it, a line a prompt set and temperature:
    a sampled text is not held against a greedy one."""
    table, names = result.plan.tables[key], [row.name for row in result.plan.tables[key].rows]
    if table.against is None:
        return
    numbers = range(names.index(table.against), len(names))
    alike: dict[Sampling, list[Method]] = {}
    for method in (each for number in numbers for each in result.plan.lines(key, number)):
        alike.setdefault(method.configurations[0].sampling, []).append(method)
    for prompts, methods in product(result.sets_of(table), alike.values()):
        timings = [result.timing(prompts, method.configurations[0]) for method in methods]
        shown = [
            f"{method.label} {cells.of_ratio(timing.over(timings[0]))}"
            for method, timing in zip(methods[1:], timings[1:], strict=True)
            if timing is not None and timings[0] is not None
        ]
        if shown:
            yield f"{prompts}: times as fast as {methods[0].label}: {'; '.join(shown)}."


def _forward_times(result: PapersResult, key: str) -> Iterator[Section]:
    """Table 2 of SpecDec++, beside a `frontier` table."""
    frame = result.forward_times(key) if result.plan.tables[key].frontier else pd.DataFrame()
    if frame.empty:
        return
    found = result.throughputs(key)
    checked = []
    if not found.empty:
        checked.append(
            "Predicted throughputs (Eq. 5.1 and the prompt's constant) deviate by"
            f" {found['error'].max():.1%} at most and {found['error'].median():.1%} in the median"
            f" from {len(found)} measured ones; in the paper by 6.2 % at most."
        )
    yield Section(
        key=f"{key}-forwards",
        title=f"Forward times by regression: {result.plan.tables[key].title}",
        note="Seconds of each decoding over its forwards of both models and a constant for the "
        "prompt (SpecDec++, §5.2, Table 2; there R² is 0.988 to 0.9998). Autoregressive is the "
        "target alone. Times are left out, with the reason, where the decodings do not determine"
        " them.",
        lines=checked,
        terms={VERDICT: forwards_verdict(result, key)},
        shown=cells.table(frame, FORWARDS),
    )


def _name_of(result: PapersResult, prompts: str, configuration: Configuration) -> str:
    """What the first table with these prompts calls a configuration, and its label; a bandit's
    label lists all of its arms and is left out."""
    label = configuration.label
    for key, table in result.tables().items():
        if prompts not in table.prompts:
            continue
        for method in result.plan.methods(key):
            if configuration in method.configurations:
                bandit = isinstance(configuration.drafter, BanditSettings)
                return method.name if bandit else f"{method.name} ({label})"
    return label


def notes(result: PapersResult) -> list[str]:
    """What differs from the papers, and how this was measured."""
    runner, plan = result.pair.runner, result.plan
    times = "once" if plan.repeats == 1 else f"{plan.repeats} times"
    drafts = ", ".join(f"{name} = {model}" for name, model in result.pair.drafts.items())
    missing = [
        name
        for name in dict.fromkeys(n for t in plan.tables.values() for n in t.prompts)
        if name not in result.sets
    ]
    lines = [
        *plan.notes,
        f"Models: target {result.pair.target} ({runner.target_dtype}), drafts {drafts or 'none'} "
        f"({runner.draft_dtype}); {runner.device}, {runner.threads} thread"
        + ("s" if runner.threads != 1 else "")
        + ".",
        "Prompts: "
        + "; ".join(f"{name}: {s.count} of {s.source}" for name, s in result.sets.items())
        + f"; at most {plan.max_new_tokens} new tokens.",
        f"Every prompt is decoded by all configurations in turn, {times} where a time is "
        "shown; a ratio is autoregressive time over the method's, per prompt the median of the "
        "repeats, summed over prompts, with a 95 % bootstrap interval of the pairs. What learns "
        "begins every repeat of a prompt set anew.",
        LEGEND,
    ]
    if result.target_costs:
        costs = (f"{cost:g} steps of {draft}" for draft, cost in result.target_costs.items())
        lines.append(f"To policies that ask, a target forward costs {', '.join(costs)}: measured.")
    if missing:
        lines.append(f"Left out, because their prompts are not here: {', '.join(missing)}.")
    drafted = [
        (m.timing.differing_outputs, result.sets[m.prompts].count)
        for m in result.measured
        if m.timing and m.configuration.drafter and m.configuration.drafter.lossless
        if m.configuration.sampling.greedy
    ]
    differing, outputs = (
        (sum(column) for column in zip(*drafted, strict=True)) if drafted else (0, 0)
    )
    if differing:
        lines.append(
            f"{differing} of {outputs:,} greedy outputs of lossless methods differ from"
            " autoregressive decoding's: verifying several tokens at once rounds differently."
        )
        lines += _gaps(result)
    return lines


def _gaps(result: PapersResult) -> list[str]:
    """The logit gaps at the first differences, beside the rounding of those forwards."""
    if not (found := result.differences):
        return []
    gaps = [each.gap for each in found]
    line = (
        f"At the first difference the two tokens' logits are {median(gaps):.3g} apart in the median"
        f" and {max(gaps):.3g} at most; a forward's width changes logits by"
        f" {median(each.rounding for each in found):.3g} in the median."
    )
    if faults := [each for each in found if each.fault]:
        worst = max(faults, key=lambda each: each.gap - 2 * each.rounding)
        line += (
            f" A fault: {len(faults)} gaps are larger than twice their forward's rounding, the"
            f" worst {worst.gap:.3g} against {worst.rounding:.3g} ({worst.prompts}, prompt"
            f" {worst.prompt}, position {worst.position}, configuration {worst.config_id})."
        )
    else:
        line += " No gap is larger than twice its forward's rounding: near-ties flip."
    return [line]


def _named(result: PapersResult) -> Iterator[tuple[str, Configuration]]:
    """The methods of all tables; one that varies a number is shown with its first value."""
    for key, table in result.tables().items():
        value = f" at {table.varied} = {table.values[0]}" if table.varied else ""
        for method in result.plan.methods(key):
            yield f"{method.label}{value}", method.configurations[0]


class Column(NamedTuple):
    """A prompt set, a value of what the table varies, and a quantity."""

    prompts: str
    number: int  # of the value
    quantity: Quantity


def tables(result: PapersResult) -> list[Section]:
    """The sections of all tables."""
    return [section for key in result.tables() for section in sections_of(result, key)]


def sections_of(result: PapersResult, key: str) -> list[Section]:
    """A table: methods down; prompt sets, values and quantities across. Behind it, for a `frontier`
    one, the forward times that its decodings have."""
    return [_table(result, key), *_forward_times(result, key)]


def _table(result: PapersResult, key: str) -> Section:
    table, methods = result.plan.tables[key], result.plan.methods(key)
    columns = [
        Column(prompts, number, quantity)
        for prompts in result.sets_of(table)
        for number in range(len(table.values))
        for quantity in table.columns
    ]
    texts: list[list[str]] = [[method.label for method in methods]]
    best: set[tuple[int, int]] = set()
    for place, column in enumerate(columns, start=1):
        values = [
            result.value(column.prompts, method.configurations[column.number], column.quantity)
            for method in methods
        ]
        leader = _leader(methods, column, values)
        if leader is not None:
            best.add((methods.index(leader), place))
        texts.append(
            [
                _cell(result, table, method, column, value, leader)
                for method, value in zip(methods, values, strict=True)
            ]
        )
    headings = [("method",), *(_heading(result, table, column) for column in columns)]
    shown = pd.DataFrame(dict(enumerate(texts)), dtype=object)
    shown.columns = _grouped(headings)
    brief = _brief(shown.columns)
    if any(method.reported for method in methods):
        paper = "paper" if shown.columns.nlevels == 1 else ("", "paper")
        shown[paper] = [method.reported or cells.NONE for method in methods]
    return Section(
        key=key,
        title=table.title,
        note=_caption(result, table),
        lines=(*table.notes, *_against(result, key)),
        terms={VERDICT: said} if (said := table_verdict(result, key)) else {},
        svg=paper_svg(result, key),
        frame=result.frame(key),
        shown=shown,
        best=best,
        tooltips=[tooltip(method.configurations[0]) for method in methods],
        brief=brief,
        intervals=False,
    )


def _grouped(headings: Sequence[tuple[str, ...]]) -> pd.Index:
    """Columns grouped by prompt set, where the headings name several."""
    if any(len(heading) < 2 for heading in headings[1:]):
        return pd.Index([" ".join(heading) for heading in headings])
    (first,), *others = headings
    return pd.MultiIndex.from_tuples(
        [("", first), *((group, " ".join(rest)) for group, *rest in others)]
    )


def _brief(columns: pd.Index) -> list[str | tuple[str, str]]:
    """What a console shows: of each prompt set the ratio, and other quantities as they fit."""
    if len(columns) - 1 <= MOST_COLUMNS or columns.nlevels == 1:
        return list(columns)
    groups = len(list(groupby(columns[1:], key=lambda heading: heading[0])))
    quantities = list(dict.fromkeys(heading[1] for heading in columns[1:]))
    quantities.sort(key=lambda name: name != QUANTITIES["speedup"].heading)
    kept = quantities[: max(MOST_COLUMNS // groups, 1)]
    return [columns[0], *(heading for heading in columns[1:] if heading[1] in kept)]


def _leader(methods: Sequence[Method], column: Column, values: Sequence[float]) -> Method | None:
    """The best lossless method of a column; none where there is nothing to choose from."""
    known = [
        (value, method)
        for value, method in zip(values, methods, strict=True)
        if method.lossless and not math.isnan(value)
    ]
    if len(known) < 2:
        return None
    choose = min if column.quantity in LESS_IS_BETTER else max
    return choose(known, key=itemgetter(0))[1]


def _cell(
    result: PapersResult,
    table: Table,
    method: Method,
    column: Column,
    value: float,
    leader: Method | None,
) -> str:
    text = cells.as_number(value, QUANTITIES[column.quantity].form)
    timing = result.timing(column.prompts, method.configurations[column.number])
    if column.quantity != "speedup" or timing is None or timing.low == timing.high:
        return text
    if leader is not None and method is not leader:
        fastest = result.timing(column.prompts, leader.configurations[column.number])
        if fastest is not None and fastest.over(timing).tied:
            text = "=" + text
    return text if table.varied else f"{text} ({timing.low:.2f}–{timing.high:.2f})"


def _heading(result: PapersResult, table: Table, column: Column) -> tuple[str, ...]:
    parts = []
    if len(result.sets_of(table)) > 1:
        parts.append(column.prompts)
    if table.varied:
        parts.append(f"{table.varied} = {table.values[column.number]}")
    if len(table.columns) > 1 or not parts:
        parts.append(QUANTITIES[column.quantity].heading)
    return tuple(parts)


def _caption(result: PapersResult, table: Table) -> str:
    """The paper, the prompts, and what the columns mean."""
    temperatures = ", ".join(f"{t:g}" for t in table.temperatures)
    if table.top_k:
        temperatures += f" and top-k {table.top_k}"
    sets = ", ".join(f"{name} ({result.sets[name].count})" for name in result.sets_of(table))
    looks = [QUANTITIES[quantity] for quantity in table.columns]
    columns = "; ".join(f"{look.heading}: {look.meaning}" for look in looks)
    drafts = [*result.pair.drafts]
    draft = "" if table.each_draft or not drafts else f", draft {drafts[table.draft - 1]}"
    return f"{table.paper}. {sets} prompts, temperature {temperatures}{draft}. {columns}."


def _metrics(result: PapersResult) -> Iterator[tuple[str, float]]:
    """Every number as `<table>.<method>.<prompts>.<quantity>`."""
    for key, table in result.tables().items():
        for row in result.frame(key).to_dict("records"):
            parts = [key, row["method"], row["prompts"]]
            parts += [f"{table.varied}_{row[table.varied]}"] if table.varied else []
            for quantity in table.columns:
                if not math.isnan(row[quantity]):
                    yield metric_name(*parts, quantity), row[quantity]
