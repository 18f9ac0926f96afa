"""Compare the ranking of a server's settings by replay with their times in that server."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated

from typer import Option

from jobs.choice import choose
from jobs.console import deliver, interruptible, run
from jobs.export import by_replay
from jobs.options import (
    Config,
    Hardware,
    MaybeLimit,
    Name,
    ProfileFile,
    Repeats,
    check_name,
    check_times,
    sizes,
)
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import AUTOREGRESSIVE

if TYPE_CHECKING:
    from pathlib import Path

    from research.scan.study import ScanResult
    from specdec_core.base.observer import Observer
    from specdec_core.config import PairSpec
    from specdec_core.cost import Profile
    from specdec_core.recordings.replay import Replay
    from specdec_core.servers.server import Server


def main(
    to: Annotated[str, Option(help="vllm or transformers.")],
    config: Config = None,
    traces: Annotated[
        str | None,
        Option(help="Recording, a folder or a name; unset, the latest of the pair."),
    ] = None,
    hardware: Hardware = None,
    profile: ProfileFile = None,
    lengths: Annotated[
        str, Option(help="Candidates of a round to try, as 1,2,4.")
    ] = "1,2,3,4,5,6,8,10",
    limit: MaybeLimit = None,
    repeats: Repeats = 2,
    name: Name = None,
) -> None:
    """Run the server with each of its settings, interleaved, on the recorded prompts. Compare the
    ranking by replay with the measured one. Run it on an otherwise idle machine."""
    check_times(hardware, profile)
    check_name(name)
    from specdec_core.servers.table import server_of

    server, wanted = server_of(to, stage="bench"), sizes(lengths, "--lengths")
    spec = choose(config)[0].pair
    folder = workspace() / "scans" / (name or f"{spec.name}-{to}-{datetime.now():%Y%m%d-%H%M%S}")
    if folder.exists():
        raise UserError(f"{folder} exists: give another --name")
    from research.scan.report import report

    scan = partial(_scan, folder, server, spec, wanted, limit, repeats)
    with interruptible("nothing was written"):
        why = "a ranking by replay is compared"
        result = by_replay(scan, why, spec, AUTOREGRESSIVE, traces, hardware, profile)
    deliver(report(result), folder, "scan", [result.save(folder)])


def _scan(
    folder: Path,
    server: Server,
    spec: PairSpec,
    lengths: tuple[int, ...],
    limit: int | None,
    repeats: int,
    replay: Replay,
    times: Profile,
    progress: Observer,
) -> ScanResult:
    from research.scan.study import run_scan
    from specdec_core.models.pair import load_pair
    from specdec_core.search.nearest import rank
    from specdec_core.servers.model_files import models_of

    if not replay.header.sampling.greedy:
        raise UserError(
            f"{replay.recording.folder}: was sampled, and a scan decodes greedily; record the"
            " prompts at temperature 0"
        )
    progress.stage(f"loading {spec.name}")
    pair = load_pair(spec)
    models = models_of(spec, server.heads, dtype=pair.target.dtype, gguf=server.gguf)
    ranked = rank(server, models, replay, times, progress)
    return run_scan(
        folder.name, server, models, pair, replay, times, ranked, lengths, limit, repeats, progress
    )


if __name__ == "__main__":
    run(main)
