"""Choose a configuration for each range of load: simulated, and timed live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from jobs.console import console, deliver, point, run, serve_command
from jobs.options import Name, check_name, sizes
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import PairConfiguration, parse
from specdec_core.search.load.workload import CLIENTS, Slo, Workload
from specdec_core.search.plan import load_plan


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
            help="Step times, or forward times of another machine (YAML), to choose for by"
            " simulation alone; unset, the workspace's, measured if missing."
        ),
    ] = None,
    live: Annotated[
        bool, Option(help="Time the best few at each load; else the simulation decides.")
    ] = True,
    decode: Annotated[
        bool | None,
        Option(
            "--decode/--no-decode",
            help="Decode the prompts live, once, under what the recording cannot replay; else it is"
            " left out. Unset, where no --hardware is given.",
        ),
    ] = None,
    name: Name = None,
) -> None:
    """Simulate every configuration of a sweep file, and the target alone, with 1, 2, 4, … clients,
    by rounds that are replayed, or decoded live where the recording cannot tell them; time the best
    few at each load live; choose for each, and write the choices as one configuration that drafts
    by the load, to serve.
    """
    check_name(name)
    plan = load_plan(config)
    objective = Slo.read(slo, "--slo") if slo else None
    counts = sizes(clients, "--clients") if clients is not None else None

    # torch and MLflow take seconds to import.
    from dashboards.progress import ConsoleProgress
    from dashboards.reports.schedule import report
    from dashboards.sections import Origin
    from specdec_core.cost.steps import load_step_times
    from specdec_core.models.pair import load_pair
    from specdec_core.recordings.replay import Replay
    from specdec_core.search.load.choice import choose_for_load
    from specdec_core.search.load.decoded import can_simulate, decoded_live
    from specdec_core.search.load.traffic import Traffic
    from specdec_core.search.replaying import find_named
    from specdec_core.search.results import may_win
    from specdec_core.studies.live_rounds import with_live
    from specdec_core.studies.load_timer import EngineTimer
    from specdec_core.studies.step_times import step_times

    workload = plan.workload or Workload(clients=CLIENTS)
    if counts is not None:
        kept = workload.model_dump(include={"slo", "requests"})
        workload = parse(Workload, {"clients": counts, **kept}, f"--clients {clients}")
    if objective is not None:
        workload = workload.model_copy(update={"slo": objective})
    recording = find_named(traces, workspace(), drawn=True)
    header = recording.header
    if header.sampling != plan.sampling:
        raise UserError(f"{recording.folder}: recorded with other sampling than {config} has")
    replay = Replay(recording, hidden=any(each.heads for each in plan.samples), drawn=True)
    traffic = Traffic.of(workload, recording)
    with ConsoleProgress(console) as progress:
        if hardware is not None:
            times = load_step_times(hardware, list(header.pair.drafts))
        else:
            path = workspace() / "steps.json"
            times = step_times(header.pair, path, traffic.limits.slots, progress)
        configurations = plan.configurations or ()
        allowed = [
            each.priced(times)
            for each in configurations
            if may_win(each, plan.allow_lossy) and not each.foreign_draft(header.pair.drafts)
        ]
        if decode if decode is not None else hardware is None:
            replay = with_live(replay, allowed, progress)
        candidates = [each for each in allowed if can_simulate(replay, each)]
        if not candidates:
            raise UserError(f"{config}: no configuration whose rounds {recording.folder} can tell")
        timer = None
        if hardware is None and live and plan.live.finalists:
            timer = EngineTimer(load_pair(header.pair), traffic)
        choice, simulated = choose_for_load(
            candidates, replay, times, workload, plan.live, timer, observer=progress
        )

    decoded = sum(decoded_live(replay, each) for each in candidates)
    folder = workspace() / "schedules" / (name or recording.folder.name)
    written = PairConfiguration(pair=header.pair, configuration=choice.chosen)
    schedule = written.save(folder / "schedule.yaml")
    notes = [
        f"{len(candidates)} configurations of {config}, {decoded} of them decoded live, as they"
        f" cannot be replayed; {len(configurations) - len(candidates)} more left out",
        f"prompts of {recording.folder.name}, at most {header.max_new_tokens} new tokens",
        f"step times: {hardware or times.device}",
    ]
    params = {"recording": recording.folder.name, "config": str(config), "by": choice.by}
    origin = Origin(name=folder.name, pair=header.pair.name, notes=notes, params=params)
    deliver(report(choice, simulated, origin), folder, "schedule", [schedule])
    point("schedule", schedule)
    point("serve", serve_command(workload, "--config", str(schedule)))


if __name__ == "__main__":
    run(main)
