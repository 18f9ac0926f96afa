"""The progress of a sweep on the console."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.search.observer import SweepObserver
from specdec_core.search.results import SweepResult, Trial


class _Count(MofNCompleteColumn):
    """n/m, or nothing where steps are not counted."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total else Text("")


class SweepProgress(SweepObserver):
    """A line for each stage; a context manager that shows it while the sweep runs. Where output
    is not a terminal, a line when a stage begins and now and then one for its steps."""

    columns: tuple[ProgressColumn, ...] = ()

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            _Count(),
            TimeElapsedColumn(),
            *self.columns,
            console=console,
            disable=not console.is_terminal,
        )
        self.task: int | None = None
        self.name, self.total, self.done = "", 0, 0

    def __enter__(self) -> SweepProgress:
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._complete()
        self.progress.stop()

    def begun(self, result: SweepResult, prompts: Sequence[Prompt], folder: Path) -> None:
        self.console.print(f"sweep [bold]{escape(result.name)}[/bold], {len(prompts)} prompts")

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        self._complete()
        if done and steps:
            self.console.print(f"resuming: {done} of {steps} done")
        self.name, self.total, self.done = name, steps or 0, done
        self.task = self.progress.add_task(escape(name), total=steps, completed=done)
        if not self.console.is_terminal:
            self.console.print(f"{escape(name)} …")

    def step(self) -> None:
        self.done += 1
        if self.task is not None:
            self.progress.advance(self.task)
        quarter = max(self.total // 4, 1)
        if not self.console.is_terminal and self.done % quarter == 0:
            self.console.print(f"{escape(self.name)}: {self.done} of {self.total}")

    def trial_finished(self, trial: Trial) -> None:
        if self.task is not None:
            label = f"{self.name} · {trial.configuration.label}"
            self.progress.update(self.task, description=escape(label))

    def warned(self, message: str) -> None:
        self.console.print(f"[yellow]warning:[/yellow] {escape(message)}")

    def _complete(self) -> None:
        """The stage before this one is over."""
        if self.task is not None:
            task = self.progress.tasks[self.task]
            total = task.total or 1
            self.progress.update(
                self.task, description=escape(self.name), total=total, completed=total
            )
            self.progress.stop_task(self.task)


class RaceProgress(SweepProgress):
    """The same with the time that is left: the steps of a race are alike."""

    columns = (TextColumn("left"), TimeRemainingColumn())
