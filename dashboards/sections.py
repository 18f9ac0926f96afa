"""What a study has to show: a report of sections, which every output writes in its own way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dashboards import cells
from specdec_core.base.names import plain_name
from specdec_core.prompts.prompt_sets import Prompt, PromptSet

Metrics = dict[str, float | dict[int, float]]  # by name: a number, or a number by step


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a report: a note, lines, terms, a figure and a table, each if it is set.

    `shown` has a table's cells as text, a column a heading; headings may be (group, heading).
    `frame` has the numbers, written as `<key>.csv`.
    """

    key: str = ""  # empty until it is known: of its files and links
    title: str = ""
    note: str = ""
    lines: Sequence[str] = ()
    terms: Mapping[str, str] = field(default_factory=dict)
    figure: go.Figure | None = None
    svg: str | None = None  # the figure as a file, for Markdown and for pages without `figure`
    shown: pd.DataFrame | None = None
    frame: pd.DataFrame | None = None
    legend: str = ""  # what the marks in the table mean
    marked: Collection[int] = ()  # rows to stress
    best: Collection[tuple[int, int]] = ()  # cells to stress, by row and column
    ruled: Collection[int] = ()  # rows below which there is a line
    swatches: Sequence[str] = ()  # each row's colour in the figures
    tooltips: Sequence[str] = ()  # what a row says when it is pointed at
    sortable: bool = False
    brief: Sequence[Any] = ()  # columns that a console shows; unset, all
    intervals: bool = True  # whether it shows them with their intervals
    on_console: bool = True
    style: str = ""  # of the page: caveats, long

    @classmethod
    def drawn(cls, key: str, figure: go.Figure, frame: pd.DataFrame | None = None) -> Section:
        """A figure under its own title, and the table that belongs to it, if any."""
        return cls(
            key=key,
            title=figure.layout.title.text,
            note=figure.layout.title.subtitle.text,
            figure=figure,
            frame=frame,
            shown=None if frame is None else cells.everything(frame),
            on_console=False,
        )


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A run in MLflow. A metric is a number, or a number by step.

    `files` are files or folders, each with the artifact folder for it; unset, the top one. `texts`
    are artifacts by name. `prompts` are logged as a dataset that was used in a context.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float | Mapping[int, float]] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[tuple[Path, str | None]] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    prompts: tuple[PromptSet, Sequence[Prompt], str] | None = None
    nested: Sequence[LoggedRun] = ()


def metric_name(*parts: str) -> str:
    """A metric's name, joined of parts in which only letters, digits, _ and - are kept."""
    return ".".join(map(plain_name, parts))


@dataclass(frozen=True, kw_only=True)
class ReportOrigin:
    """Where a result comes from: its folder's name, the pair, and how it was measured, in words and
    as parameters."""

    name: str
    pair: str
    notes: Sequence[str] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    started: datetime | None = None
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a command found. `frames` are further tables to write as `<name>.csv`."""

    command: str
    title: str
    origin: ReportOrigin
    parts: Sequence[Section]
    findings: Sequence[str] = ()  # what came out, in sentences
    frames: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    run_name: str = ""  # in MLflow; unset, command and name
    metrics: Mapping[str, float | Mapping[int, float]] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    nested: Sequence[LoggedRun] = ()

    @property
    def about(self) -> str:
        """The line above the title: command, date and pair."""
        started = self.origin.started
        when = [f"{started:%-d %B %Y, %H:%M}"] if started else []
        whole = [f"specdec {self.command} {self.origin.name}", *when, self.origin.pair]
        return " · ".join(whole)

    @property
    def sections(self) -> list[Section]:
        """The findings, the parts, and how it was measured. A console shows the last one too where
        it has no date and is short."""
        origin = self.origin
        first = Section(key="findings", title="What came out", lines=self.findings)
        last = Section(
            key="setting",
            title="How it was measured",
            lines=origin.notes,
            terms=origin.facts,
            on_console=origin.started is None,
        )
        return [
            *([first] if first.lines else []),
            *self.parts,
            *([last] if last.lines or last.terms else []),
        ]
