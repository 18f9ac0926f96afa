"""A recording on the console: its progress, and what it holds."""

from __future__ import annotations

from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from specdec_core.recordings.observer import RecordingObserver
from specdec_core.recordings.schema import Recording


class RecordingProgress(RecordingObserver):
    """Prompts and tokens as they are recorded; a context manager. Where output is not a terminal,
    a line now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.started, self.seconds = monotonic(), 0.0
        self.total = self.done = self.prompts = self.tokens = 0

    def __enter__(self) -> RecordingProgress:
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.stop()
        if kind is None and self.prompts:
            self.console.print(
                f"{self.prompts} prompts in {self.seconds:.1f} s:"
                f" {self.prompts / self.seconds:.2f} prompts/s, {self._rate}"
            )

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        if done:
            self.console.print(f"resuming: {done} of {steps} prompts done")
        if not self.console.is_terminal:
            self.console.print(f"{escape(name)} …")
        for task in self.progress.task_ids:
            self.progress.remove_task(task)
        self.progress.add_task(escape(name), total=steps, completed=done, rate="")
        self.started, self.total, self.done = monotonic(), steps or 0, done

    def recorded(self, prompts: int, tokens: int) -> None:
        before = self.done
        self.done += prompts
        self.prompts += prompts
        self.tokens += tokens
        self.seconds = monotonic() - self.started
        for task in self.progress.task_ids:
            self.progress.update(task, completed=self.done, rate=self._rate)
        quarter = max(self.total // 4, 1)
        if not self.console.is_terminal and self.done // quarter > before // quarter:
            self.console.print(f"recording: {self.done} of {self.total} prompts, {self._rate}")

    def warned(self, message: str) -> None:
        self.console.print(f"[yellow]warning:[/yellow] {escape(message)}", soft_wrap=True)

    @property
    def _rate(self) -> str:
        return f"{self.tokens / self.seconds:.0f} tokens/s"


def recording_table(recording: Recording) -> Table:
    """How each draft follows the target along the recorded texts."""
    sampling = recording.header.sampling
    table = Table(min_width=70)
    table.add_column("draft")
    headings = ["rows", "disagreements", "agreement"]
    if not sampling.greedy:
        headings.append("Σ min(p, q)")
    if sampling.fixed_output:  # a chain is stopped by its first disagreement
        headings.append("oracle N_target/N")
    for heading in headings:
        table.add_column(heading, justify="right")
    for draft in recording.header.pair.drafts:
        trace = recording.trace(draft, hidden=False)
        disagreements = int((~trace.agrees).sum())
        cells = [f"{len(trace):,}", f"{disagreements:,}", f"{trace.agrees.mean():.3f}"]
        if not sampling.greedy:
            cells.append(f"{trace.overlap[trace.trajectory].mean():.3f}")
        if sampling.fixed_output:
            # SpecDec++, Thm 4.1: one verification a rejection, and one to end each text.
            oracle = (disagreements + len(trace.lengths)) / len(trace.agrees)
            cells.append(f"{oracle:.3f}")
        table.add_row(escape(draft), *cells)
    if not sampling.greedy:
        rule = "coupled sampling accepts by agreement, rejection sampling with Σ min(p, q)"
        table.caption = rule
    return table


def contents(recording: Recording) -> str:
    """How much was recorded."""
    drafts = recording.header.pair.drafts
    rows = sum(len(recording.trace(draft, hidden=False)) for draft in drafts)
    size = sum(file.stat().st_size for file in recording.folder.rglob("shard-*.parquet"))
    outputs = recording.prompts.outputs
    return (
        f"{len(outputs)} prompts, {sum(map(len, outputs)):,} tokens of the target, {rows:,} rows,"
        f" {size / 1e6:.1f} MB"
    )
