"""Choose a configuration for each range of load, by simulation of recorded rounds."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

from jobs.choice import PairConfiguration
from jobs.console import console, deliver, point, program, run
from jobs.options import Name, check_name, sizes
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.search.load.workload import Slo
from specdec_core.search.plan import ResolvedPlan, load_plan


def main(
    traces: Annotated[str, Option(help="Recording to replay, a folder or a name.")],
    config: Annotated[Path, Option(help="Sweep file whose configurations to choose from.")],
    clients: Annotated[
        str | None,
        Option(help="Requests at once, as 1,4,16; unset, the sweep file's, or 1,2,4,8,16."),
    ] = None,
    slo: Annotated[
        str | None,
        Option(help="Choose by goodput within limits in seconds, as ttft=0.3; unset, by tokens/s."),
    ] = None,
    hardware: Annotated[
        Path | None,
        Option(
            help="Step times, or forward times of another machine (YAML); unset, the workspace's,"
            " measured if missing."
        ),
    ] = None,
    name: Name = None,
) -> None:
    """Simulate every configuration of a sweep file that the recording can replay, and the target
    alone, with 1, 2, 4, … clients; choose the best for each number, and write them as one
    configuration that drafts by the load, to serve.
    """
    check_name(name)
    plan = load_plan(config)
    counts = sizes(clients, "--clients") if clients is not None else None
    choose_for_load(
        plan, str(config), traces, counts, Slo.read(slo, "--slo") if slo else None, hardware, name
    )


def choose_for_load(
    plan: ResolvedPlan,
    source: str,
    traces: str,
    clients: Sequence[int] | None = None,
    slo: Slo | None = None,
    hardware: Path | None = None,
    name: str | None = None,
) -> None:
    """Choose among a plan's configurations, of the file `source`, for each number of clients, by a
    recording. Clients and SLO that are not given are the plan's. Raises :class:`UserError`."""
    workload = plan.workload
    asked = workload.clients if workload is not None else None
    objective = slo or (workload.slo if workload else None)

    # pandas, torch and MLflow take seconds to import.
    import pandas as pd

    from dashboards.progress import ConsoleProgress
    from dashboards.reports.schedule import report
    from dashboards.sections import Origin
    from specdec_core.cost.steps import load_step_times
    from specdec_core.recordings.replay import Replay
    from specdec_core.search.load.schedule import CLIENTS, choose_schedule, simulate_each
    from specdec_core.search.replaying import find_named, split
    from specdec_core.studies.step_times import step_times

    counts = clients or asked or CLIENTS
    recording = find_named(traces, workspace())
    header = recording.header
    if header.sampling != plan.sampling:
        raise UserError(f"{recording.folder}: recorded with other sampling than {source} has")
    heads = any(each.heads for each in plan.samples)
    replay = Replay(recording, hidden=heads)
    known, unknown = split(plan.configurations or (), replay)
    if not known:
        raise UserError(f"{source}: no configuration that {recording.folder} can replay")
    with ConsoleProgress(console) as progress:
        if hardware is not None:
            times = load_step_times(hardware, list(header.pair.drafts))
        else:
            path = workspace() / "steps.json"
            times = step_times(header.pair, path, max(counts), progress)
        simulated = simulate_each(
            replay, known, times, sorted(set(counts)), slo=objective, observer=progress
        )
    candidates = [plan.autoregressive, *known]
    by = "goodput" if objective else "tokens_per_second"
    chosen = choose_schedule(simulated, candidates, by)
    if chosen not in candidates:  # the load changes while it is followed
        whole = simulate_each(replay, [chosen], times, sorted(set(counts)), slo=objective)
        whole = whole[whole["config_id"] == chosen.id]
        simulated = pd.concat([simulated, whole], ignore_index=True)

    folder = workspace() / "schedules" / (name or recording.folder.name)
    written = PairConfiguration(pair=header.pair, configuration=chosen)
    path = written.save(folder / "schedule.yaml")
    notes = [
        f"{len(known)} configurations of {source}, {len(unknown)} more cannot be replayed",
        f"prompts of {recording.folder.name}; chosen by"
        f" {f'goodput with {objective}' if objective else 'tokens a second'}",
        f"step times: {hardware or times.device}",
    ]
    params = {"recording": recording.folder.name, "config": source, "by": by}
    origin = Origin(name=folder.name, pair=header.pair.name, notes=notes, params=params)
    deliver(report(chosen, simulated, candidates, by, origin), folder, "schedule", [path])
    point("schedule", path)
    point("serve", shlex.join([program("specdec"), "serve", "--config", str(path)]))


if __name__ == "__main__":
    run(main)
