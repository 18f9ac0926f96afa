"""All figures of a sweep, its heads and its traces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd

from dashboards import figures
from dashboards.reports.heads import ablation
from dashboards.reports.load_choice import simulation
from dashboards.sections import Section
from specdec_core.base.errors import UserError
from specdec_core.search.results import SweepResult

if TYPE_CHECKING:
    from dashboards.evidence import Evidence
    from specdec_core.drafting.heads.card import HeadCard


def drawn(
    result: SweepResult, rounds: pd.DataFrame, evidence: Evidence | None = None
) -> list[Section]:
    """All figures of a sweep."""
    heads = ablation(cards(result), result)
    traces = _of_traces(evidence) if evidence is not None else ()
    return [
        *_of_sweep(result, rounds),
        *_part("Many requests at once", simulation(result.under_load) if result.under_load else ()),
        *_part("The trained heads", heads),
        *_part("What the traces say", traces),
    ]


def _part(heading: str, sections: Iterable[Section]) -> Iterator[Section]:
    """The sections, the first with the heading of them all."""
    for number, section in enumerate(sections):
        yield section if number else replace(section, part=heading)


def _of_sweep(result: SweepResult, rounds: pd.DataFrame) -> Iterator[Section]:
    yield Section.drawn("frontier", figures.frontier(result))
    yield Section.drawn("speedups", figures.speedups(result))
    yield Section.drawn("time", figures.time_per_token(result))
    yield Section.drawn("accepted", figures.accepted_lengths(result, rounds))
    yield Section.drawn("lengths", figures.lengths_over_position(result, rounds))
    if max(m.width for m in result.profile.target.measurements) > 1:  # else not measured
        yield Section.drawn("forwards", figures.forward_times(result))
    trees = figures.trees_frame(result)
    if len(trees) >= figures.LEAST_TREES:
        yield Section.drawn("trees", figures.tree_heatmap(trees))
    generations = figures.generation_times(result, rounds)
    regressed = figures.regression_table(generations)
    if regressed["t_draft (ms)"].notna().any():
        yield Section.drawn("regression", figures.time_regression(generations), regressed)


def _of_traces(evidence: Evidence) -> Iterator[Section]:
    """What a recording says about drafts and policies."""
    tokens = evidence.tokens
    if evidence.distances is not None and len(evidence.distances):
        yield Section.drawn("oracle", figures.length_errors(evidence.distances))
    if evidence.runs:
        runs = figures.utilisation_over_time(evidence.runs, evidence.families)
        yield Section.drawn("utilisation", runs)
    if evidence.prefixes:
        yield Section.drawn("confidence", figures.acceptance_by_confidence(evidence.prefixes))
    if tokens:
        outcomes = figures.entropy_by_outcome(tokens)
        yield Section.drawn("entropy", outcomes, figures.entropy_table(tokens))
        of_draft, draft = tokens[evidence.draft], evidence.draft
        yield Section.drawn("bounds", figures.acceptance_bounds(of_draft, draft))
        with suppress(ValueError):  # a draft that is the target has no ratio to fit
            yield Section.drawn("ratio", figures.ratio_of_entropies(of_draft, draft))


def cards(result: SweepResult) -> dict[str, HeadCard]:
    """The cards of the heads in a sweep, without heads that are gone."""
    loaded: dict[str, HeadCard] = {}
    if names := figures.head_names(result):
        from specdec_core.drafting.heads.storage import load_card  # torch takes seconds to import

        for name in names:
            with suppress(UserError):
                loaded[name] = load_card(name)
    return loaded
