"""The figures of the papers' tables."""

from __future__ import annotations

import math
from typing import NamedTuple

from dashboards import cells
from dashboards.look import OTHER_COLOURS, style
from research.papers.plan import Method, Quantity
from research.papers.result import PapersResult
from research.svg import DASHES, SvgBar, SvgLine, bars_svg, lines_svg


class Look(NamedTuple):
    """How a quantity is shown: heading, format and meaning."""

    heading: str
    form: str
    meaning: str


QUANTITIES: dict[Quantity, Look] = {
    "tokens_per_second": Look("tok/s", ".0f", "output tokens per second, prefill included"),
    "speedup": Look("ratio", ".2f×", "times as fast as autoregressive decoding"),
    "mat": Look("MAT", ".2f", "output tokens per target forward"),
    "accepted_per_round": Look("accepted", ".2f", "accepted tokens per target forward"),
    "acceptance_rate": Look("acc./drafted", ".1%", "accepted over drafted tokens"),
    "path_rate": Look("α", ".2f", "longest accepted path over maximum depth"),
    "utilisation": Look("Util", ".2f", "output tokens per draft forward (Post-use, Eq. 3)"),
    "discard_rate": Look("discard rate", ".3f", "thrown-away tokens per output token"),
    "verification_rate": Look("verific. rate", ".3f", "target forwards per output token"),
}
FRONTIER: tuple[Quantity, Quantity] = ("discard_rate", "verification_rate")


def paper_svg(result: PapersResult, key: str) -> str:
    """A table's ratio, else its first quantity: a bar for each method, prompt set and value; of a
    `frontier` table, both rates."""
    table = result.plan.tables[key]
    if table.frontier:
        return _frontier(result, key)
    quantity: Quantity = "speedup" if "speedup" in table.columns else table.columns[0]
    heading, form, meaning = QUANTITIES[quantity]
    sets = result.sets_of(table)
    bars = []
    for method in result.plan.methods(key):
        for number, configuration in enumerate(method.configurations):
            for prompts in sets:
                value = result.value(prompts, configuration, quantity)
                if configuration.drafter is None or math.isnan(value):
                    continue
                parts = [method.label]
                parts += [f"{table.varied} = {table.values[number]}"] if table.varied else []
                parts += [prompts] if len(sets) > 1 else []
                timing = result.timing(prompts, configuration) if quantity == "speedup" else None
                ends = (timing.low, timing.high) if timing else (value, value)
                label = cells.as_number(value, form)
                bars.append(SvgBar(", ".join(parts), prompts, value, *ends, label))
    colours = dict(zip(sets, OTHER_COLOURS, strict=False))
    return bars_svg(table.title, f"{heading}: {meaning}", bars, colours, quantity == "speedup")


def _frontier(result: PapersResult, key: str) -> str:
    """Verification over discard rates (SpecDec++, Fig. 3): a line for each prompt set and family of
    configurations, in the order of the table."""
    table, lines = result.plan.tables[key], []
    for number, prompts in enumerate(result.sets_of(table)):
        families: dict[str, list[Method]] = {}
        for method in result.plan.methods(key):
            configuration = method.configurations[0]
            if configuration.drafter is not None and result.find(prompts, configuration):
                families.setdefault(configuration.family, []).append(method)
        for family, methods in families.items():
            x, y = (
                [result.value(prompts, m.configurations[0], rate) for m in methods]
                for rate in FRONTIER
            )
            dash = DASHES[number % len(DASHES)]
            lines.append(SvgLine(f"{family}, {prompts}", style(family).colour, x, y, dash))
    x_axis, y_axis = (QUANTITIES[rate] for rate in FRONTIER)
    meanings = f"{x_axis.heading}: {x_axis.meaning}; {y_axis.heading}: {y_axis.meaning}"
    return lines_svg(table.title, meanings, lines, (x_axis.heading, y_axis.heading))
