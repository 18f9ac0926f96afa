"""Write a sweep's HTML report again, from what the sweep left behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from jobs.console import console, point, run
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.search.results import SweepResult

OF_A_SERVER = "server.json"  # the result of a sweep of a server


def main(
    sweep_folder: Annotated[
        Path | None,
        typer.Argument(help="The folder of a sweep; unset, the newest one of the workspace."),
    ] = None,
) -> None:
    """Write <sweep folder>/report.html: one file with everything in it, to open or send around."""
    # plotly takes a second to import, what a server's sweep is read with takes several
    from dashboards.outputs.files import write_page

    folder = newest_sweep(workspace() / "sweeps") if sweep_folder is None else sweep_folder
    if os.path.exists(folder / OF_A_SERVER):  # a name may be too long
        from dashboards.reports import server_sweep
        from specdec_core.evidence.server_choice import ServerSweep

        report = server_sweep.report(ServerSweep.load(folder))
    else:
        from dashboards.reports import sweep

        report = sweep.report(SweepResult.load(folder))
    page = write_page(report, folder)
    console.print(report.title, style="bold", markup=False)
    point("report", page)


def newest_sweep(sweeps: Path) -> Path:
    """The folder in `sweeps` with the newest result. Raises :class:`UserError` without a result."""
    found = [path for name in (SweepResult.FILE, OF_A_SERVER) for path in sweeps.glob(f"*/{name}")]
    results = sorted(found, key=lambda path: path.stat().st_mtime)
    if not results:
        raise UserError(f"{sweeps}: no sweep yet; run `specdec sweep` first")
    return results[-1].parent


if __name__ == "__main__":
    run(main)
