"""Write a configuration as the settings of another server."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from rich.markup import escape
from typer import Option

from jobs.choice import choose
from jobs.console import console, deliver, interruptible, point, print_configuration, run
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
from specdec_core.config import (
    AUTOREGRESSIVE,
    Configuration,
    DrafterSettings,
    PairConfiguration,
    PairSpec,
)

if TYPE_CHECKING:
    from specdec_core.base.observer import Observer
    from specdec_core.cost import Profile
    from specdec_core.export.nearest import Nearest
    from specdec_core.export.server import ExportTarget, Models, WrittenFiles
    from specdec_core.recordings.replay import Replay
    from specdec_core.search.results import Trial

T = TypeVar("T")

USAGE = "usage.txt"
RUN_HERE = ("vllm", "transformers")
SHOWN = 8  # of the ranked settings


def main(
    to: Annotated[str, Option(help="vllm, sglang, trtllm, llamacpp or transformers.")],
    config: Config = None,
    version: Annotated[
        str | None, Option(help="The server's version; unset, the one whose settings are known.")
    ] = None,
    plugin: Annotated[
        bool,
        Option(
            "--plugin",
            help="For vllm and transformers: have this library draft there, by the configuration"
            " as it is.",
        ),
    ] = False,
    fastest: Annotated[
        bool,
        Option(
            "--fastest",
            help="Of all that the server can be told, write what is fastest by replay, whatever"
            " the configuration is. With the server's own times as --profile.",
        ),
    ] = False,
    traces: Annotated[
        str | None,
        Option(
            help="Recording, a folder or a name, on which to find what is fastest, or nearest to a"
            " configuration that the server has no counterpart of; unset, the latest of the pair."
        ),
    ] = None,
    hardware: Hardware = None,
    profile: ProfileFile = None,
    out: Annotated[
        Path | None, Option(help="Folder to write to; unset, one in the workspace.")
    ] = None,
    check: Annotated[
        bool,
        Option(
            "--check",
            help="Instead: run the server (vllm or transformers) with each of its settings,"
            " interleaved, on the recorded prompts, and compare the ranking by replay with the"
            " measured one. Run it on an otherwise idle machine.",
        ),
    ] = False,
    lengths: Annotated[
        str, Option(help="With --check: candidates of a round to try, as 1,2,4.")
    ] = "1,2,3,4,5,6,8,10",
    limit: MaybeLimit = None,
    repeats: Repeats = 2,
    name: Name = None,
) -> None:
    """Write the champion, or another configuration, as the settings of the server that you run, and
    say how to start it. What the server cannot express is replaced by the nearest setting by
    replay, with the speed that this is expected to cost."""
    check_times(hardware, profile)
    if check:
        _check(to, config, traces, hardware, profile, lengths, limit, repeats, name)
        return
    if plugin and fastest:
        raise UserError("--plugin and --fastest: a plug-in drafts by the configuration as it is")
    from specdec_core.export.nearest import rank, told
    from specdec_core.export.places import placed
    from specdec_core.export.servers import server_of

    server = server_of(to, version)
    choice, source = choose(config)
    pair, configuration = choice.pair, choice.configuration
    if not configuration.lossless:
        raise UserError(
            f"{configuration.label} is lossy: {server.title} verifies every token, so it has no"
            " counterpart"
        )
    models = models_for(pair, server, plugin)
    find = partial(by_replay, pair=pair, configuration=configuration, traces=traces,
                   hardware=hardware, profile=profile)  # fmt: skip
    if not fastest:
        print_configuration(configuration, source)
    if plugin:
        measured = server.measures and hardware is None and profile is None
        priced = configuration if measured else _priced(choice, hardware, profile)
        written = server.plugged_in(placed(priced), models, pair.runner)
    else:
        if fastest:
            ranked = find(partial(rank, server, models), "--fastest is found by replay")
            found = server.counterpart(ranked[0].configuration.drafter, models)
            assert found is not None  # a ranked drafter has one
            counterpart = found
            _show_ranked(server, ranked)
        else:
            counterpart, nearest = told(server, models, configuration, find)
            if nearest is not None:
                say_nearest(server, configuration.drafter, nearest)
        for remark in counterpart.remarks:
            console.print(f"{server.title} {escape(remark)}", soft_wrap=True)
        if not server.verified:
            console.print(f"{server.title} was not run with this: it follows the documentation")
        written = server.written(counterpart, models)
    _deliver(server, written, version, out or workspace() / "export" / f"{pair.name}-{to}")


def _check(
    to: str,
    config: Path | None,
    traces: str | None,
    hardware: Path | None,
    profile: Path | None,
    lengths: str,
    limit: int | None,
    repeats: int,
    name: str | None,
) -> None:
    """Time a server's settings, and report the regret of the ranking by replay."""
    check_name(name)
    from specdec_core.export.servers import server_of

    server, wanted = server_of(to), sizes(lengths, "--lengths")
    if to not in RUN_HERE:
        raise UserError(f"--to {to}: it does not run here; --check runs {' or '.join(RUN_HERE)}")
    spec = choose(config)[0].pair
    folder = workspace() / "scans" / (name or f"{spec.name}-{to}-{datetime.now():%Y%m%d-%H%M%S}")
    if folder.exists():
        raise UserError(f"{folder} exists: give another --name")
    from dashboards.progress import ConsoleProgress
    from dashboards.reports.scan import report
    from specdec_core.export.nearest import rank
    from specdec_core.export.places import models_of
    from specdec_core.export.scan_peers import ScanPlan, run_scan
    from specdec_core.models.pair import load_pair

    with ConsoleProgress(console) as progress, interruptible("nothing was written"):
        why = "--check compares what replay ranks"
        replay, times = recorded(spec, AUTOREGRESSIVE, traces, hardware, profile, why, progress)
        if not replay.header.sampling.greedy:
            raise UserError(
                f"{replay.recording.folder}: was sampled, and --check decodes greedily; record the"
                " prompts at temperature 0"
            )
        progress.stage(f"loading {spec.name}")
        pair = load_pair(spec)
        models = models_of(spec, server.heads)
        ranked = rank(server, models, replay, times, progress)
        plan = ScanPlan(folder.name, wanted, limit, repeats)
        result = run_scan(plan, server, models, pair, replay, times, ranked, progress)
    deliver(report(result), folder, "scan", [result.save(folder)])


def _priced(
    choice: PairConfiguration, hardware: Path | None, profile: Path | None
) -> Configuration:
    """The configuration at the forward costs that its policies need: from the given times, or from
    those of the workspace, which are measured if missing."""
    configuration = choice.configuration
    if not configuration.unpriced:
        return configuration
    from dashboards.progress import ConsoleProgress
    from specdec_core.measure.forward_times import forward_times
    from specdec_core.models.pair import resolve_dtypes

    drafts = configuration.drafts_of(choice.pair.drafts)
    pair = resolve_dtypes(choice.pair.model_copy(update={"drafts": drafts}))
    with ConsoleProgress(console) as progress:
        return configuration.priced(forward_times(pair, [], hardware, profile, progress))


def _deliver(
    server: ExportTarget, written: WrittenFiles, version: str | None, folder: Path
) -> None:
    """Write the files, and say how they are used. A file of an earlier export to this server is
    replaced, or deleted where the new export has no such file."""
    from specdec_core.base.files import write_atomically

    before = folder / USAGE
    used = before.read_text() if before.exists() else ""
    for name in server.files:
        if name in used and name not in written.files:
            (folder / name).unlink(missing_ok=True)
    for name, text in {**written.files, USAGE: written.usage + "\n"}.items():
        write_atomically(folder / name, text)
    for name in written.files:
        point("written", folder / name)
    point("for", f"{server.title} {version or server.version}")
    console.print(f"\n{escape(written.usage)}", soft_wrap=True)


def models_for(pair: PairSpec, server: ExportTarget, plug_in: bool = False) -> Models:
    """The places of the pair's models for another program, or for our `plug_in` in that program.
    Raises :class:`UserError` for a missing model."""
    with console.status("looking the models up"):
        from specdec_core.export.places import models_of  # torch takes a second

        return models_of(pair, server.heads, plug_in)


def by_replay(
    find: Callable[[Replay, Profile, Observer], T],
    why: str,
    pair: PairSpec,
    configuration: Configuration,
    traces: str | None = None,
    hardware: Path | None = None,
    profile: Path | None = None,
) -> T:
    """The result of `find` for a recording of the pair and the forward times. `why` says what the
    recording is needed for."""
    from dashboards.progress import ConsoleProgress

    with ConsoleProgress(console) as progress:
        replay, times = recorded(pair, configuration, traces, hardware, profile, why, progress)
        if replay.header.sampling != configuration.sampling:
            progress.warned(
                f"by replay of {replay.recording.folder.name}, which has another sampling than"
                " the configuration"
            )
        return find(replay, times, progress)


def recorded(
    pair: PairSpec,
    configuration: Configuration,
    traces: str | None,
    hardware: Path | None,
    profile: Path | None,
    why: str,
    observer: Observer,
) -> tuple[Replay, Profile]:
    """The replay of the recording `traces`, or of the pair's latest recording, preferably under the
    configuration's sampling; and the forward times. Raises :class:`UserError` without a recording,
    with `why` it is needed, and for a recording of other weights."""
    from specdec_core.export.places import recording_of
    from specdec_core.measure.forward_times import forward_times, timed
    from specdec_core.recordings.replay import Replay

    recording = recording_of(pair, workspace(), configuration.sampling, traces)
    if recording is None:
        raise UserError(
            f"{why}, and no recording of {pair.name} tells what comes nearest: make one with"
            " `specdec record`"
        )
    header, of = recording.header, recording.header.pair
    if profile is not None:
        of = timed(of, profile, observer)
    times = forward_times(of, [], hardware, profile, observer, header.fingerprints)
    return Replay(recording, hidden=bool(configuration.heads), profile=times), times


def _show_ranked(server: ExportTarget, ranked: list[Trial]) -> None:
    from dashboards.outputs.console import table
    from dashboards.reports.scan import ranking

    console.print(table(ranking(ranked[:SHOWN])))
    console.print(
        f"the fastest of {len(ranked)} that {server.title} can be told, by replay", soft_wrap=True
    )


def say_nearest(server: ExportTarget, asked: DrafterSettings | None, nearest: Nearest) -> None:
    """Print the nearest setting that replaces what was `asked` for, and its expected cost."""
    instead = nearest.drafter.label if nearest.drafter is not None else "no speculation"
    what = asked.label if asked is not None else "autoregressive"
    share = f", {nearest.share:.2f} of its speed by replay" if nearest.share is not None else ""
    console.print(
        f"{server.title} has no counterpart of {escape(what)}; nearest of {nearest.tried}:"
        f" {escape(instead)}{share}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    run(main)
