"""The simulation of load beside live runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd

from dashboards import cells
from dashboards.cells import Cell
from dashboards.sections import Section


class Measure(NamedTuple):
    """A heading, a number's format and the factor of its unit."""

    heading: str
    form: str
    scale: float = 1.0


TPOT = Measure("TPOT p50, ms", ".2f", 1e3)
TTFT = Measure("TTFT p95, ms", ".2f", 1e3)


def simulated(
    table: pd.DataFrame,
    measures: Mapping[str, Measure],
    columns: Mapping[str, Cell],
    **more: Any,
) -> Section:
    """The `columns` that tell the rows apart, then each of the `measures` live, simulated and the
    simulation's error, from the columns `<name>`, `<name>_simulated` and `<name>_error`; `more` are
    fields of the section."""
    shown = dict(columns)
    for place, (name, (heading, form, scale)) in enumerate(measures.items()):
        again = " " * place  # headings have to differ
        shown |= {
            heading: cells.number(name, form, scale),
            f"simulated{again}": cells.number(f"{name}_simulated", form, scale),
            f"off by{again}": cells.number(f"{name}_error", "+.0%"),
        }
    return Section(frame=table, shown=cells.table(table, shown), **more)
