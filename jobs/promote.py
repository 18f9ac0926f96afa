"""Make another configuration of a sweep the champion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jobs.console import console, program, run
from specdec_core.base.errors import UserError


def main(
    config_id: Annotated[str, typer.Argument(help="Id of a configuration, or its beginning.")],
    sweep: Annotated[
        Path | None, typer.Option(help="The sweep's folder; unset, the latest that has it.")
    ] = None,
    challenger: Annotated[
        bool, typer.Option("--challenger", help="Make it the challenger; the champion stays.")
    ] = False,
    uncertified: Annotated[
        bool, typer.Option("--uncertified", help="Go on without a certificate.")
    ] = False,
) -> None:
    """Move the alias `champion` to a configuration of a finished sweep that has a certificate."""
    from dashboards.tracking.registry import CHALLENGER, CHAMPION, register
    from specdec_core.base.workspace import workspace
    from specdec_core.search.folder import find_trial
    from specdec_core.studies.certificate.certificate import find_certificate

    result, trial = find_trial(workspace() / "sweeps", config_id, sweep)
    certificate = find_certificate(result.pair, trial.configuration)
    if certificate is None and not uncertified:
        raise UserError(
            f"{trial.id} has no certificate for {result.pair.name}:"
            f" `{program('specdec')} certify --config {trial.id}` writes one,"
            " --uncertified goes on without"
        )
    alias = CHALLENGER if challenger else CHAMPION
    version = register(result, trial.id, alias=alias)
    if not trial.configuration.lossless:
        console.print(
            "[yellow]warning:[/yellow] a lossy method: its output does not keep the target's "
            "distribution",
            soft_wrap=True,
        )
    if certificate is None:
        console.print("[yellow]warning:[/yellow] not certified")
    else:
        console.print(certificate.sentence)
    console.print(
        f"{alias} of {result.pair.name}: [bold]{trial.configuration.label}[/bold] ({trial.id}), "
        f"version {version}"
    )
    console.print(trial.configuration.sentence, style="dim", markup=False, soft_wrap=True)


if __name__ == "__main__":
    run(main)
