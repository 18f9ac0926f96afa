"""All figures of a sweep and its heads."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from dashboards.figures.frontier import frontier
from dashboards.figures.sweep import speedups, time_per_token
from dashboards.reports.heads import reliability
from dashboards.sections import Section
from specdec_core.base.errors import UserError
from specdec_core.search.results import SweepResult

if TYPE_CHECKING:
    from specdec_core.drafting.heads.card import HeadCard


def drawn(result: SweepResult) -> list[Section]:
    """All figures of a sweep."""
    sections = [
        Section.drawn("frontier", frontier(result)),
        Section.drawn("speedups", speedups(result)),
        Section.drawn("time", time_per_token(result)),
    ]
    if heads := cards(result):
        sections.append(reliability(heads))
    return sections


def cards(result: SweepResult) -> dict[str, HeadCard]:
    """The cards of the heads in a sweep, without heads that are gone."""
    loaded: dict[str, HeadCard] = {}
    configurations = [trial.configuration for trial in result.trials]
    if names := dict.fromkeys(head for each in configurations for _, head in each.heads):
        from specdec_core.drafting.heads.storage import load_card  # torch takes seconds to import

        for name in names:
            with suppress(UserError):
                loaded[name] = load_card(name)
    return loaded
