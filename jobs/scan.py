"""Time the settings of another server in turns, and hold a ranking by replay against them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs.console import console, deliver, interruptible, run
from jobs.export import recorded
from jobs.options import (
    Drafts,
    Hardware,
    MaybeLimit,
    Name,
    ProfileFile,
    Repeats,
    Target,
    check_name,
    check_times,
    chosen_pair,
    sizes,
)
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import AUTOREGRESSIVE, PairSpec

RUN = ("vllm", "transformers")  # servers that run here

if TYPE_CHECKING:
    from specdec_core.base.observer import Observer
    from specdec_core.cost import Profile
    from specdec_core.export.scan import ScanResult
    from specdec_core.export.server import Server
    from specdec_core.recordings.replay import Replay


def main(
    to: Annotated[str, Option(help="vllm or transformers.")],
    target: Target = None,
    draft: Drafts = None,
    traces: Annotated[
        str | None,
        Option(
            help="Recording, a folder or a name, to rank by and whose prompts are decoded; unset,"
            " the latest of the pair."
        ),
    ] = None,
    hardware: Hardware = None,
    profile: ProfileFile = None,
    lengths: Annotated[
        str, Option(help="Candidates of a step, as 1,2,4: of each way to draft.")
    ] = "1,2,3,4,5,6,8,10",
    limit: MaybeLimit = None,
    repeats: Repeats = 2,
    name: Name = None,
) -> None:
    """Rank what a server can be told by replay, with the server's own forward times as --profile;
    then run it with these settings, in turns on the recorded prompts. Report how far the ranking's
    first choice is from the fastest. Run it on an otherwise idle machine."""
    check_times(hardware, profile)
    check_name(name)
    from specdec_core.export.servers import server_of

    server, wanted = server_of(to), sizes(lengths, "--lengths")
    if to not in RUN:
        raise UserError(f"--to {to}: it does not run here; a scan is of {' or '.join(RUN)}")
    spec = chosen_pair(PairSpec(), target, draft)
    folder = workspace() / "scans" / (name or f"{spec.name}-{to}-{datetime.now():%Y%m%d-%H%M%S}")
    if folder.exists():
        raise UserError(f"{folder} exists: give another --name")
    from dashboards.progress import ConsoleProgress
    from dashboards.reports.scan import report

    with ConsoleProgress(console) as progress, interruptible("nothing was written"):
        why = "a scan is of what replay ranks"
        replay, times = recorded(spec, AUTOREGRESSIVE, traces, hardware, profile, why, progress)
        if not replay.header.sampling.greedy:
            raise UserError(
                f"{replay.recording.folder}: was sampled, and a scan decodes greedily; record the"
                " prompts at temperature 0"
            )
        result = _scan(server, spec, replay, times, wanted, limit, repeats, folder.name, progress)
    deliver(report(result), folder, "scan", [result.save(folder)])


def _scan(
    server: Server,
    spec: PairSpec,
    replay: Replay,
    times: Profile,
    lengths: tuple[int, ...],
    limit: int | None,
    repeats: int,
    name: str,
    observer: Observer,
) -> ScanResult:
    from specdec_core.export.nearest import rank
    from specdec_core.export.places import models_of
    from specdec_core.export.scan_peers import ScanPlan, run_scan
    from specdec_core.models.pair import load_pair

    observer.stage(f"loading {spec.name}")
    pair = load_pair(spec)
    models = models_of(spec, server.heads)
    ranked = rank(server, models, replay, times, observer)
    plan = ScanPlan(name, lengths, limit, repeats)
    return run_scan(plan, server, models, pair, replay, times, ranked, observer)


if __name__ == "__main__":
    run(main)
