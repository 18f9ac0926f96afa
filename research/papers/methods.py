"""What the papers' methods are, where they are in the code and its tests, and what was measured.

A YAML file lists them by paper; it is checked against the plan's tables.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import Field

from research.papers.plan import PaperPlan, Quantity
from research.papers.result import PapersResult
from specdec_core.base.errors import UserError
from specdec_core.config import Value, load_yaml, parse


class Ours(Value):
    """Where a method is measured: the row of a table, and which of its columns."""

    table: str
    row: str
    quantity: Quantity


class OursOfSection(Value):
    """The section of the page that shows where a method is measured."""

    section: str


class PaperMethod(Value):
    """A method, equation, table or figure of a paper. `code` and `test` are paths in the
    repository; `reported` is what the paper found."""

    method: str
    source: str
    code: str
    test: str
    reported: str = ""
    ours: Ours | OursOfSection | None = None


class Paper(Value):
    """A paper, the keys of its tables in the plan, and its methods. `exhibits` are the tables and
    figures that it prints: each has the keys of the tables and sections that show it here, or the
    reason why none does. `errata` are where the text is wrong or unclear, and what is done here."""

    title: str
    tables: tuple[str, ...] = ()
    exhibits: Mapping[str, tuple[str, ...] | str] = Field(default={})
    methods: tuple[PaperMethod, ...]
    errata: tuple[str, ...] = ()


def load_methods(path: Path, plan: PaperPlan, sections: Collection[str] = ()) -> tuple[Paper, ...]:
    """The papers of a file. Raises :class:`UserError` for a table, row or quantity that the plan
    lacks, and for a section that is not among `sections`."""
    papers = parse(tuple[Paper, ...], load_yaml(path), str(path))
    sections = {*sections, *(f"{key}-forwards" for key, t in plan.tables.items() if t.frontier)}
    for paper in papers:
        for key in paper.tables:
            if key not in plan.tables:
                raise UserError(f"{path}: {paper.title}: no table {key!r} in the plan")
        for name, shown in paper.exhibits.items():
            for key in () if isinstance(shown, str) else shown:
                if key not in plan.tables and key not in sections:
                    raise UserError(f"{path}: {paper.title}: {name}: no table or section {key!r}")
        for each in paper.methods:
            if (ours := each.ours) is None:
                continue
            if isinstance(ours, OursOfSection):
                if ours.section not in sections:
                    raise UserError(f"{path}: {each.method}: no section {ours.section!r}")
                continue
            table = plan.tables.get(ours.table)
            if table is None or ours.row not in [row.name for row in table.rows]:
                raise UserError(f"{path}: {each.method}: no row {ours.row!r} in {ours.table!r}")
            if ours.quantity not in table.columns:
                raise UserError(f"{path}: {each.method}: {ours.table!r} has no {ours.quantity}")
    return papers


def measured_range(result: PapersResult, ours: Ours) -> tuple[float, float] | None:
    """The smallest and the largest value of a row over prompt sets, drafts, temperatures and varied
    values; None where it was not measured."""
    if ours.table not in result.tables():
        return None
    table = result.plan.tables[ours.table]
    values = [
        result.value(prompts, configuration, ours.quantity)
        for number, row in enumerate(table.rows)
        if row.name == ours.row
        for method in result.plan.lines(ours.table, number)
        for configuration in method.configurations
        for prompts in result.sets_of(table)
    ]
    known = [value for value in values if not math.isnan(value)]
    return (min(known), max(known)) if known else None
