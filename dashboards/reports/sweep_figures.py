"""All figures of a sweep and its heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd

from dashboards.figures.frontier import frontier
from dashboards.figures.heads import head_names
from dashboards.figures.sweep import accepted_lengths, speedups, time_per_token
from dashboards.figures.times import forward_times
from dashboards.reports.heads import reliability
from dashboards.reports.load_choice import simulation
from dashboards.sections import Section
from specdec_core.base.errors import UserError
from specdec_core.search.results import SweepResult

if TYPE_CHECKING:
    from specdec_core.drafting.heads.card import HeadCard


def drawn(result: SweepResult, rounds: pd.DataFrame) -> list[Section]:
    """All figures of a sweep."""
    heads, choice = cards(result), result.under_load
    return [
        *_of_sweep(result, rounds),
        *_part("Many requests at once", simulation(choice) if choice else ()),
        *_part("The trained heads", [reliability(heads, result)] if heads else ()),
    ]


def _part(heading: str, sections: Iterable[Section]) -> Iterator[Section]:
    """The sections, the first with the heading of them all."""
    for number, section in enumerate(sections):
        yield section if number else replace(section, part=heading)


def _of_sweep(result: SweepResult, rounds: pd.DataFrame) -> Iterator[Section]:
    yield Section.drawn("frontier", frontier(result))
    yield Section.drawn("speedups", speedups(result))
    yield Section.drawn("time", time_per_token(result))
    yield Section.drawn("accepted", accepted_lengths(result, rounds))
    if max(m.width for m in result.profile.target.measurements) > 1:  # else not measured
        yield Section.drawn("forwards", forward_times(result))


def cards(result: SweepResult) -> dict[str, HeadCard]:
    """The cards of the heads in a sweep, without heads that are gone."""
    loaded: dict[str, HeadCard] = {}
    if names := head_names(result):
        from specdec_core.drafting.heads.storage import load_card  # torch takes seconds to import

        for name in names:
            with suppress(UserError):
                loaded[name] = load_card(name)
    return loaded
