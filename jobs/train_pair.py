"""Train the bundled pair again. Finished phases and the latest checkpoint are kept in `--work`: the
same command resumes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import mlflow
import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from dashboards.outputs.console import show
from dashboards.reports.bundled_pair import section
from dashboards.store import connect, tracking_uri
from dashboards.views import present
from jobs.console import console, point, run
from specdec_core.base.errors import UserError
from specdec_core.config import load_yaml, parse
from specdec_core.training.bundled_pair.card import write_card
from specdec_core.training.bundled_pair.recipe import claim, train_pair
from specdec_core.training.bundled_pair.settings import SMOKE, Settings

SECONDS_BETWEEN_METRICS = 5.0


class PhaseProgress:
    """Shows a phase's progress and logs its figures to the active MLflow run."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.tasks: dict[str, TaskID] = {}
        self.logged: dict[str, float] = {}

    def __call__(self, phase: str, share: float, figures: dict[str, float]) -> None:
        if phase not in self.tasks:
            self.tasks[phase] = self.progress.add_task(phase, total=1.0, figures="")
        shown = "  ".join(f"{name} {value:,.4g}" for name, value in figures.items())
        self.progress.update(self.tasks[phase], completed=share, figures=shown)
        now = time.monotonic()
        due = now - self.logged.get(phase, -SECONDS_BETWEEN_METRICS) >= SECONDS_BETWEEN_METRICS
        if figures and (due or share >= 1):
            self.logged[phase] = now
            metrics = {f"{phase}.{name}": value for name, value in figures.items()}
            mlflow.log_metrics(metrics, step=int(figures.get("tokens", 0)))


def settings_from(smoke: bool, config: Path | None) -> Settings:
    """The recipe's settings: the defaults or the smoke ones, changed by a YAML file's keys."""
    base = SMOKE if smoke else Settings()
    if config is None:
        return base
    changes = load_yaml(config) or {}
    if not isinstance(changes, dict):
        raise UserError(f"{config}: expected a mapping of settings")
    return parse(Settings, base.model_dump() | changes, str(config))


def main(
    work: Annotated[Path, typer.Option(help="Checkpoints and finished phases of a recipe.")] = Path(
        "build/pair"
    ),
    out: Annotated[Path, typer.Option(help="Receives weights/ and prompts.json.")] = Path(
        "build/bundled"
    ),
    config: Annotated[Path | None, typer.Option(help="YAML with settings to change.")] = None,
    smoke: Annotated[bool, typer.Option(help="Tiny models, every phase, seconds.")] = False,
) -> None:
    """Train the target, sharpen it, distil the drafts, measure the pair, write its model card."""
    settings = settings_from(smoke, config)
    claim(settings, work)
    client = connect()
    mlflow.set_tracking_uri(tracking_uri())
    present(client, mlflow.set_experiment("train_pair"), views={})
    figures = TextColumn("{task.fields[figures]}", table_column=Column(overflow="fold"))
    columns = (TextColumn("{task.description}"), BarColumn(16), TimeElapsedColumn(), figures)
    shown = Progress(*columns, console=console)
    with mlflow.start_run(), shown as progress:
        flat = {k: v for k, v in settings.model_dump().items() if not isinstance(v, dict)}
        mlflow.log_params(flat)
        trained = train_pair(settings, work, out, PhaseProgress(progress))
        card = out / "weights" / "README.md"
        write_card(settings, trained["facts"], trained["results"], card)
        for split, drafts in trained["results"]["alignment"].items():
            for name, row in drafts.items():
                mlflow.log_metrics({f"{split}.{name}.{key}": value for key, value in row.items()})
        mlflow.log_dict(trained, "pair.json")
        mlflow.log_artifact(str(card))
    show(console, [section(trained["results"])])
    point("weights", f"{out}, with prompts and model card")


if __name__ == "__main__":
    run(main)
