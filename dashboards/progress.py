"""The progress of long work on the console."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from specdec_core.base.observer import Observer
from specdec_core.prompts.prompt_sets import Prompt
from specdec_core.search.observer import SweepObserver
from specdec_core.search.results import SweepResult, Trial

if TYPE_CHECKING:
    from specdec_core.training.trainer import LoopReport


class _Count(MofNCompleteColumn):
    """n/m, or nothing where steps are not counted."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total else Text("")


class ConsoleProgress(Observer):
    """A context manager that shows a line for each stage of the work. Where output is not a
    terminal, it prints a line when a stage begins, and up to four for its steps."""

    columns: tuple[ProgressColumn, ...] = ()

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            _Count(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            *self.columns,
            console=console,
            disable=not console.is_terminal,
        )
        self.task: TaskID | None = None
        self.name, self.total, self.done = "", 0, 0

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self._complete()
        self.progress.stop()

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        self._complete()
        if done and steps:
            self.console.print(f"resuming: {done} of {steps} done")
        self.name, self.total, self.done = name, steps or 0, done
        self.task = self.progress.add_task(escape(name), total=steps, completed=done, detail="")
        if not self.console.is_terminal:
            self.console.print(f"{escape(name)} …")

    def step(self) -> None:
        self._advance(1)

    def recorded(self, prompts: int, tokens: int) -> None:
        self._advance(prompts)

    def warned(self, message: str) -> None:
        self.console.print(f"[yellow]warning:[/yellow] {escape(message)}", soft_wrap=True)

    def _advance(self, steps: int, detail: str = "") -> None:
        before, self.done = self.done, self.done + steps
        if self.task is not None:
            self.progress.update(self.task, advance=steps, detail=detail)
        quarter = max(self.total // 4, 1)
        if not self.console.is_terminal and self.done // quarter > before // quarter:
            line = f"{escape(self.name)}: {self.done}"
            line += f" of {self.total}" if self.total else ""
            self.console.print(f"{line}, {detail}" if detail else line)

    def _complete(self) -> None:
        """Show the current stage as done."""
        if self.task is not None:
            task = self.progress.tasks[self.task]
            total = task.total or 1
            self.progress.update(
                self.task, description=escape(self.name), total=total, completed=total, detail=""
            )
            self.progress.stop_task(self.task)


class RaceProgress(ConsoleProgress):
    """Also shows the time left: all steps of a race take about as long."""

    columns = (TextColumn("left"), TimeRemainingColumn())


class TrainingProgress(ConsoleProgress):
    """A training on recorded answers: steps are hundredths of it."""

    evaluated = ""

    def advanced(self, standing: LoopReport, summary: str) -> None:
        """The training has progressed; `summary` is of its evaluation, where one was due."""
        detail = f"loss {standing.loss:.2f}"
        if standing.seconds:
            detail += f", {standing.speed:.0f} tokens/s"
        if self.evaluated or summary:
            self.evaluated = summary or self.evaluated
            detail += f", {self.evaluated}"
        self._advance(round(100 * standing.share) - self.done, detail)


class SweepProgress(ConsoleProgress, SweepObserver):
    """A sweep, with the configuration that was counted last. `tracking` hears first of its stages
    and of its beginning."""

    def __init__(self, console: Console, tracking: SweepObserver) -> None:
        super().__init__(console)
        self.tracking = tracking

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        self.tracking.stage(name, steps, done)
        super().stage(name, steps, done)

    def begun(self, result: SweepResult, prompts: Sequence[Prompt], folder: Path) -> None:
        self.tracking.begun(result, prompts, folder)
        self.console.print(f"sweep [bold]{escape(result.name)}[/bold], {len(prompts)} prompts")

    def trial_finished(self, trial: Trial) -> None:
        if self.task is not None:
            label = f"{self.name} · {trial.configuration.label}"
            self.progress.update(self.task, description=escape(label))


class RecordingProgress(RaceProgress):
    """A recording: its steps are prompts. At the end it prints how fast it was."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.started, self.seconds = monotonic(), 0.0
        self.prompts = self.tokens = 0

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        super().__exit__(kind, *error)
        if kind is None and self.prompts:
            self.console.print(
                f"{self.prompts} prompts in {self.seconds:.1f} s:"
                f" {self.prompts / self.seconds:.2f} prompts/s, {self._rate}"
            )

    def stage(self, name: str, steps: int | None = None, done: int = 0) -> None:
        super().stage(name, steps, done)
        self.started = monotonic()

    def recorded(self, prompts: int, tokens: int) -> None:
        self.prompts += prompts
        self.tokens += tokens
        self.seconds = monotonic() - self.started
        self._advance(prompts, self._rate)

    @property
    def _rate(self) -> str:
        return f"{self.tokens / self.seconds:.0f} tokens/s"
