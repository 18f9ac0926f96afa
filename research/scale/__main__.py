"""Measure how counting scales over nodes, and what a driver keeps up with.

The nodes are Ray nodes of this machine, each with its own scheduler and object store.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs.console import console, run
from jobs.options import sizes

if TYPE_CHECKING:
    from specdec_core.search.results import SweepResult


@contextmanager
def scratch_workspace() -> Iterator[Path]:
    """A temporary workspace for the block, deleted at its end."""
    before = os.environ.get("SPECDEC_HOME")
    with tempfile.TemporaryDirectory() as home:
        os.environ["SPECDEC_HOME"] = home
        try:
            yield Path(home)
        finally:
            if before is None:
                del os.environ["SPECDEC_HOME"]
            else:
                os.environ["SPECDEC_HOME"] = before


def main(
    nodes: Annotated[str, Option(help="Nodes to count on, as 1,2.")] = "1,2",
    slots: Annotated[int, Option(min=1, help="Trials that a node runs at a time.")] = 1,
    trials: Annotated[int, Option(min=1, help="Configurations to count.")] = 24,
    idle: Annotated[
        float | None,
        Option(min=0, help="Seconds that a trial sleeps; unset, it decodes with the bundled pair."),
    ] = None,
    prompts: Annotated[int, Option(min=1, help="Held-out prompts that a trial decodes.")] = 4,
) -> None:
    """Count configurations as a sweep does (Tune, folder, MLflow) on 1, 2, … nodes of this machine.
    Show trials a second, the driver's memory, MLflow's rate, and the bottleneck. Run it on an
    otherwise idle machine."""
    counts = sizes(nodes, "--nodes")

    # Ray and MLflow take seconds to import.
    from dashboards.outputs.console import show
    from dashboards.progress import SweepProgress
    from research.scale.nodes import check_memory
    from research.scale.report import section
    from research.scale.run import count_on_nodes

    check_memory(max(counts), slots, idle is not None)
    results = []
    for count in counts:
        with scratch_workspace(), SweepProgress(console) as progress:
            results.append(
                count_on_nodes(count, slots, trials, idle, prompts, progress, _log_trials)
            )
    show(console, [section(results)])


def _log_trials(result: SweepResult) -> None:
    from dashboards.outputs.mlflow_runs import log_run
    from dashboards.store import connect, experiment_id_of
    from dashboards.tracking.trial_runs import trial_run

    client = connect()
    experiment_id = experiment_id_of(client, result.pair.name)
    for trial in result.trials:
        log_run(client, experiment_id, trial_run(result, trial))


if __name__ == "__main__":
    run(main)
