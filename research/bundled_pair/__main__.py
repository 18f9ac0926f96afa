"""Train the bundled pair again. Finished phases and the latest checkpoint are kept in `--work`: the
same command resumes."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from typer import Option

from jobs.console import console, point, run
from research.bundled_pair.settings import SMOKE, Settings
from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.config import load_yaml, parse

EXPERIMENT = "bundled-pair"
WORK, OUT = Path("build/pair"), Path("build/bundled")


class PhaseProgress:
    """Shows a phase's progress, and keeps its figures by the number of tokens."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.tasks: dict[str, TaskID] = {}
        self.curves = defaultdict[str, dict[int, float]](dict)

    def __call__(self, phase: str, share: float, figures: dict[str, float]) -> None:
        if phase not in self.tasks:
            self.tasks[phase] = self.progress.add_task(phase, total=1.0, figures="")
        shown = "  ".join(f"{name} {value:,.4g}" for name, value in figures.items())
        self.progress.update(self.tasks[phase], completed=share, figures=shown)
        for name, value in figures.items():
            self.curves[f"{phase}.{name}"][int(figures["tokens"])] = value


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
    work: Annotated[Path, Option(help="Checkpoints and finished phases of a recipe.")] = WORK,
    out: Annotated[Path, Option(help="Receives weights/, prompts.json and pair.json.")] = OUT,
    config: Annotated[Path | None, Option(help="YAML with settings to change.")] = None,
    smoke: Annotated[bool, Option(help="Tiny models, every phase, seconds.")] = False,
) -> None:
    """Train the target, sharpen it, distil the drafts, measure the pair. `pair.json` has the facts
    of the training and the results."""
    settings = settings_from(smoke, config)
    # torch and MLflow take seconds to import.
    from dashboards.outputs.mlflow_runs import log_run
    from dashboards.sections import LoggedRun
    from dashboards.store import connect, experiment_id_of
    from research.bundled_pair.recipe import claim, train_pair

    claim(settings, work)
    figures = TextColumn("{task.fields[figures]}", table_column=Column(overflow="fold"))
    columns = (TextColumn("{task.description}"), BarColumn(16), TimeElapsedColumn(), figures)
    with Progress(*columns, console=console) as progress:
        phases = PhaseProgress(progress)
        trained = train_pair(settings, work, out, phases)
    written = write_atomically(out / "pair.json", json.dumps(trained, indent=1))
    final = {
        f"{split}.{draft}.{name}": value
        for split, drafts in trained["results"]["alignment"].items()
        for draft, measured in drafts.items()
        for name, value in measured.items()
    }
    made = LoggedRun(
        name=out.name,
        params=settings.model_dump(mode="json"),
        metrics={**phases.curves, **final},
        files=[(written, None)],
    )
    client = connect()
    log_run(client, experiment_id_of(client, EXPERIMENT), made)
    for name in settings.drafts:
        agreement = final[f"held_out.{name}.agreement"]
        console.print(f"{name} agrees with the target in {agreement:.1%} of the held-out positions")
    point("weights", f"{out}, with prompts and pair.json")


if __name__ == "__main__":
    run(main)
