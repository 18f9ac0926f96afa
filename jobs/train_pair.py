"""Train the bundled pair again: `python -m jobs.train_pair`.

Every finished phase and the latest checkpoint are found again in `--work`, so a job that was
stopped goes on where it was.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import mlflow
import typer
import yaml
from pydantic import ValidationError
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from dashboards.views import present
from jobs.console import console, run
from specdec_core.base.errors import UserError
from specdec_core.training.bundled_pair.card import write_card
from specdec_core.training.bundled_pair.training import SMOKE, Settings, train_pair

SECONDS_BETWEEN_METRICS = 5.0


class Watch:
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
    base = (SMOKE if smoke else Settings()).model_dump()
    if config is None:
        return Settings(**base)
    try:
        changes = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
        return Settings(**(base | changes))
    except OSError as error:
        raise UserError(f"cannot read {config}: {error.strerror}") from error
    except (yaml.YAMLError, TypeError) as error:
        raise UserError(f"{config} is not a YAML mapping of settings") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{config}: {where}: {first['msg']}") from error


def figures_table(results: dict[str, Any]) -> Table:
    """The pair's bars, one row a draft and prompt split."""
    table = Table(title="Bundled pair, greedy")
    for column in ("draft", "prompts"):
        table.add_column(column, no_wrap=True)
    for column in ("agreement", "oracle N_target/N", "AUC", "forward ratio"):
        table.add_column(column, justify="right")
    times = results["forward_ms"]["float32"]
    for split, drafts in results["alignment"].items():
        for name, found in drafts.items():
            table.add_row(
                name,
                split,
                f"{found['agreement']:.3f}",
                f"{found['oracle_verification_rate']:.3f}",
                f"{found['confidence_auc']:.3f}",
                f"{times[name] / times['target']:.3f}",
            )
    return table


def main(
    work: Annotated[Path, typer.Option(help="Checkpoints and finished phases.")] = Path(
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
    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db"))
    present(mlflow.MlflowClient(), mlflow.set_experiment("train_pair"), views={})
    figures = TextColumn("{task.fields[figures]}", table_column=Column(overflow="fold"))
    columns = (TextColumn("{task.description}"), BarColumn(16), TimeElapsedColumn(), figures)
    shown = Progress(*columns, console=console)
    with mlflow.start_run(), shown as progress:
        flat = {k: v for k, v in settings.model_dump().items() if not isinstance(v, dict)}
        mlflow.log_params(flat)
        trained = train_pair(settings, work, out, Watch(progress))
        card = out / "weights" / "README.md"
        write_card(settings, trained["facts"], trained["results"], card)
        for split, drafts in trained["results"]["alignment"].items():
            for name, found in drafts.items():
                mlflow.log_metrics({f"{split}.{name}.{key}": value for key, value in found.items()})
        mlflow.log_dict(trained, "pair.json")
        mlflow.log_artifact(str(card))
    console.print(figures_table(trained["results"]))
    console.print(f"weights, prompts and model card in {out}")


if __name__ == "__main__":
    run(main)
