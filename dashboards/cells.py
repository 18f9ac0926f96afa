"""Numbers as text, the same in every table and sentence: ratios with their intervals, rates, times.

A table's columns are given as a mapping from heading to cell: a function from a row to its text.
What is unknown (None, NaN) is a dash.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import pandas as pd

from specdec_core.tokens.statistics import Ratio

NONE = "–"
_MARKS = "★=≈"  # before a number: the champion's, tied with it, estimated
_INTERVAL = re.compile(r"(?s)(.+) \(([^()]*\d(?:–|…| to )[^()]*)\)$")
_NUMBER = re.compile(rf"[{_MARKS} ]*[+−-]?[\d,.]+(e[+-]\d+)? ?(%|×|k|M)?( \(.*\)| of \d.*)?")

Row = Mapping[Any, Any]  # by column
Cell = Callable[[Row], str]


def unknown(value: Any) -> bool:
    return value is None or bool(pd.isna(value))


def as_number(value: float | None, form: str, scale: float = 1.0) -> str:
    """A number, multiplied by `scale`, in a format such as `.2f` or, with a unit, `.2f×`; a dash if
    unknown."""
    if value is None or pd.isna(value):
        return NONE
    spec, unit = (form[:-1], form[-1]) if form.endswith("×") else (form, "")
    return f"{scale * value:{spec}}{unit}"


def as_ratio(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """How many times as fast, with the interval unless that is a point: `1.52× (1.40–1.63)`."""
    text = as_number(value, ".2f×")
    known = not (unknown(value) or unknown(low) or unknown(high)) and low != high
    return f"{text} ({low:.2f}–{high:.2f})" if known else text


def of_ratio(ratio: Ratio) -> str:
    return as_ratio(ratio.value, ratio.low, ratio.high)


def plain(value: Any) -> str:
    """A value of any kind as text."""
    if isinstance(value, float):
        return NONE if math.isnan(value) else f"{value:.3f}" if value % 1 else f"{value:g}"
    return NONE if value is None else str(value)


def text(name: str) -> Cell:
    """A column's values as text."""
    return lambda row: NONE if unknown(row[name]) else str(row[name])


def number(name: Hashable, form: str, scale: float = 1.0) -> Cell:
    """A column by a format: :func:`as_number`; multiplied by `scale`."""
    return lambda row: as_number(row[name], form, scale)


def count(name: str) -> Cell:
    """A column of whole numbers."""
    return number(name, ",.0f")


def milliseconds(name: str) -> Cell:
    """A column of seconds."""
    return number(name, ".2f", 1e3)


def ratio(name: str, low: str | None = None, high: str | None = None) -> Cell:
    """A column of ratios, with the columns of the ends of their intervals; unset `<name>_low` and
    `<name>_high`."""
    return lambda row: as_ratio(row[name], row[low or f"{name}_low"], row[high or f"{name}_high"])


def interval(name: str, form: str) -> Cell:
    """A column with its interval, from the columns `<name>_low` and `<name>_high`."""
    value, low, high = (number(name + end, form) for end in ("", "_low", "_high"))
    return lambda row: NONE if unknown(row[name]) else f"{value(row)} ({low(row)} to {high(row)})"


def table(rows: pd.DataFrame | Iterable[Row], columns: Mapping[Any, Cell]) -> pd.DataFrame:
    """The text of each row by heading."""
    records = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else list(rows)
    cells = {heading: [cell(row) for row in records] for heading, cell in columns.items()}
    return pd.DataFrame(cells, dtype=object)


def texts(rows: Iterable[dict[str, str]]) -> pd.DataFrame:
    """Rows that are text already, by heading."""
    return pd.DataFrame(rows, dtype=object)


def everything(frame: pd.DataFrame) -> pd.DataFrame:
    """The text of a whole table."""
    return frame.astype(object).map(plain)


def group_ends(values: Iterable[Any]) -> list[int]:
    """The rows after which a column's value changes."""
    return [row for row, (value, following) in enumerate(pairwise(values)) if value != following]


def split(cell: str) -> tuple[str, str]:
    """A cell's value and its interval; empty for a cell without one."""
    match = _INTERVAL.fullmatch(cell)
    return (match[1], match[2]) if match else (cell, "")


def numeric(cells: Iterable[str]) -> bool:
    """Whether a column holds numbers, to be aligned on the right."""
    known = [cell for cell in cells if cell not in ("", NONE)]
    return all(map(_NUMBER.fullmatch, known))
