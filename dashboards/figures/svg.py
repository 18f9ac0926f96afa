"""Bars as an SVG file, which needs no browser to be made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import NamedTuple

from dashboards.look import INK, MUTED, PAPER
from dashboards.templating import render

_ROW, _TOP, _BARS, _LETTER = 22, 58, 440, 7.0  # pixels


class SvgBar(NamedTuple):
    """A value with its interval, and what is written beside it."""

    name: str
    group: str
    value: float
    low: float
    high: float
    label: str


def bars_svg(
    title: str,
    subtitle: str,
    bars: Sequence[SvgBar],
    colours: Mapping[str, str],
    one: bool = False,
) -> str:
    """`bars` in their order; `colours` are the groups'. With `one` there is a line at 1."""
    ends = [bar.high for bar in bars if not isnan(bar.high)]
    most = max([*ends, 1.0] if one else ends, default=1.0) or 1.0
    names = round(24 + _LETTER * max((len(bar.name) for bar in bars), default=0))
    scale = _BARS / most
    return render(
        "bars.jinja",
        title=title,
        subtitle=subtitle,
        width=names + _BARS + 120,
        height=_TOP + _ROW * len(bars) + 14,
        names=names,
        one=names + scale if one else None,
        top=_TOP,
        row=_ROW,
        ink=INK,
        muted=MUTED,
        paper=PAPER,
        groups=list(colours.items()) if len(colours) > 1 else [],
        bars=[
            {
                "name": bar.name,
                "colour": colours[bar.group],
                "width": scale * bar.value,
                "low": names + scale * bar.low,
                "high": names + scale * bar.high,
                "label": bar.label,
            }
            for bar in bars
        ],
    )
