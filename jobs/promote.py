"""Make another configuration of a sweep the champion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jobs.console import console, run


def main(
    config_id: Annotated[str, typer.Argument(help="Id of a configuration, or its beginning.")],
    sweep: Annotated[
        Path | None, typer.Option(help="The sweep's folder; unset, the latest that has it.")
    ] = None,
) -> None:
    """Move the alias `champion` to a configuration of a finished sweep."""
    from dashboards.tracking.registry import register
    from specdec_core.base.workspace import workspace
    from specdec_core.search.folder import find_trial

    result, trial = find_trial(workspace() / "sweeps", config_id, sweep)
    version = register(result, trial.id)
    if not trial.configuration.lossless:
        console.print(
            "[yellow]warning:[/yellow] a lossy method: its output does not keep the target's "
            "distribution",
            soft_wrap=True,
        )
    console.print(
        f"champion of {result.pair.name}: [bold]{trial.configuration.label}[/bold] ({trial.id}), "
        f"version {version}"
    )
    console.print(trial.configuration.sentence, style="dim", markup=False, soft_wrap=True)


if __name__ == "__main__":
    run(main)
