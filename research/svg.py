"""Bars and lines as SVG files, which need no browser to be made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import ceil, floor, isnan, log10
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from jinja2 import Environment, FileSystemLoader

from dashboards.look import DRAFT_COLOURS, INK, MUTED, PAPER

_ROW, _TOP, _BARS, _LETTER = 22, 58, 440, 7.0  # pixels
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.globals.update(ink=INK, muted=MUTED, paper=PAPER)
_PLOT, _LEFT, _WIDTH, _HEIGHT = 260, 64, 560, 366  # of lines
_MOST_TICKS = 12
DASHES = ("", "5 3", "2 3", "8 3 2 3")


class SvgBar(NamedTuple):
    """A value with its interval, and what is written beside it."""

    name: str
    group: str
    value: float
    low: float
    high: float
    label: str


def bars_svg(
    title: str, subtitle: str, bars: Sequence[SvgBar], colours: Mapping[str, str], one: bool = False
) -> str:
    """`bars` in their order; `colours` are the groups'. With `one` there is a line at 1."""
    ends = [bar.high for bar in bars if not isnan(bar.high)]
    most = max([*ends, 1.0] if one else ends, default=1.0) or 1.0
    names = round(24 + _LETTER * max((len(bar.name) for bar in bars), default=0))
    scale = _BARS / most
    return _TEMPLATES.get_template("bars.jinja").render(
        title=title,
        subtitle=subtitle,
        width=names + _BARS + 120,
        height=_TOP + _ROW * len(bars) + 14,
        names=names,
        one=names + scale if one else None,
        top=_TOP,
        row=_ROW,
        colours=colours,
        bars=bars,
        scale=scale,
    )


class SvgLine(NamedTuple):
    """Values over x; with `lows` and `highs` also the intervals."""

    name: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    dash: str = ""
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()

    @classmethod
    def of(
        cls,
        name: str,
        colour: str,
        frame: pd.DataFrame,
        x: str,
        y: str,
        dash: str = "",
        ends: Sequence[str] = (),
    ) -> SvgLine:
        """Column `y` over column `x`, with the columns of the intervals' `ends`, if any."""
        across, values, *intervals = (frame[column].tolist() for column in (x, y, *ends))
        return cls(name, colour, across, values, dash, *intervals)


def lines_of(
    frame: pd.DataFrame,
    x: str,
    y: str,
    by: Sequence[str],
    colours: Mapping[str, str] | Sequence[str] = DRAFT_COLOURS,
    ends: Sequence[str] = (),
) -> list[SvgLine]:
    """Column `y` over column `x`, a line for each value of the first column of `by`, in its colour,
    and of the second one, with its dash."""
    names = [list(dict.fromkeys(frame[column])) for column in by]
    if not isinstance(colours, Mapping):
        colours = dict(zip(names[0], cycle(colours), strict=False))
    return [
        SvgLine.of(
            ", ".join(map(str, place)),
            colours[str(place[0])],
            rows,
            x,
            y,
            DASHES[names[1].index(place[1]) % len(DASHES)] if len(place) > 1 else "",
            ends,
        )
        for place, rows in frame.groupby(list(by), sort=False)
    ]


def lines_svg(
    title: str,
    subtitle: str,
    lines: Sequence[SvgLine],
    axes: tuple[str, str],
    ticks: Mapping[float, str] | None = None,
    zero: bool = True,
) -> str:
    """`lines` over a common x axis, marked at `ticks`, or else at the values of x, or at round
    numbers where there are many values. `axes` are both axes' titles. With `zero` y begins at 0, or
    below."""
    xs = sorted({float(x) for line in lines for x in line.x})
    ys = [float(y) for line in lines for y in (*line.y, *line.lows, *line.highs) if not isnan(y)]
    low_x, high_x = min(xs, default=0.0), max(xs, default=1.0)
    marks_x = xs if len(xs) <= _MOST_TICKS else _marks(*_round_range(low_x, high_x))
    ticks = ticks or {x: f"{x:.4g}" for x in marks_x if low_x <= x <= high_x}
    low_y, high_y, step = _round_range(
        min([*ys, 0.0] if zero else ys, default=0.0), max(ys, default=1.0)
    )
    longest = max((len(line.name) for line in lines), default=0)
    across = _WIDTH / ((high_x - low_x) or 1.0)
    up = _PLOT / (high_y - low_y)

    def place(x: float, y: float) -> str:
        return f"{_LEFT + across * (x - low_x):.1f} {_TOP + up * (high_y - y):.1f}"

    return _TEMPLATES.get_template("lines.jinja").render(
        title=title,
        subtitle=subtitle,
        width=_LEFT + _WIDTH + 40 + round(_LETTER * longest),
        height=max(_HEIGHT, _TOP + 18 * len(lines)),
        left=_LEFT,
        right=_LEFT + _WIDTH,
        top=_TOP,
        bottom=_TOP + _PLOT,
        axes=axes,
        across=[(round(_LEFT + across * (x - low_x), 1), text) for x, text in ticks.items()],
        up=[(round(_TOP + up * (high_y - y), 1), f"{y:.4g}") for y in _marks(low_y, high_y, step)],
        lines=[
            {
                "name": line.name,
                "colour": line.colour,
                "dash": line.dash,
                "path": "L".join(
                    place(x, y) for x, y in zip(line.x, line.y, strict=True) if not isnan(y)
                ),
                "intervals": [
                    f"M{place(x, low)}L{place(x, high)}"
                    for x, low, high in zip(line.x, line.lows, line.highs, strict=False)
                ],
            }
            for line in lines
        ],
    )


def _round_range(low: float, high: float) -> tuple[float, float, float]:
    """The ends of an axis that holds both, and the step of its marks: 1, 2 or 5 times a power of
    ten."""
    span = (high - low) or 1.0
    power = 10.0 ** floor(log10(span / 5))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= span / 5)
    return step * floor(low / step + 1e-9), step * ceil(high / step - 1e-9), step


def _marks(low: float, high: float, step: float) -> list[float]:
    return [low + step * number for number in range(round((high - low) / step) + 1)]
