"""Write a configuration as the settings of another server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from rich.markup import escape
from typer import Option

from jobs.choice import choose
from jobs.console import console, point, print_configuration, run
from jobs.options import Config, ProfileFile, Traces, setting
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace
from specdec_core.config import Configuration, DrafterSettings, PairConfiguration, PairSpec

if TYPE_CHECKING:
    from specdec_core.base.observer import Observer
    from specdec_core.cost import Profile
    from specdec_core.recordings.replay import Replay
    from specdec_core.search.nearest import Nearest
    from specdec_core.servers.server import Models, Server, WrittenFiles

T = TypeVar("T")

SHOWN = 8  # of the ranked settings


def main(
    to: Annotated[str, Option(help="vllm, sglang, trtllm, llama_cpp or transformers.")],
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
            help="Of all settings of the server, write the fastest by replay, whatever the"
            " configuration is. With the server's own times as --profile.",
        ),
    ] = False,
    more: Annotated[
        list[str] | None,
        Option(
            "--set",
            help="A setting of the server that no drafter decides, as draft_tensor_parallel_size=1;"
            " repeatable.",
        ),
    ] = None,
    traces: Traces = None,
    profile: ProfileFile = None,
    out: Annotated[
        Path | None, Option(help="Folder to write to; unset, one in the workspace.")
    ] = None,
) -> None:
    """Write the champion, or another configuration, as the settings of the server that you run,
    with the command that starts it. If the server has no settings for a configuration, the
    nearest settings by replay are written, with the speed that this is expected to cost."""
    further = dict(map(setting, more or []))
    if plugin and fastest:
        raise UserError("--plugin and --fastest: a plug-in drafts by the configuration as it is")
    if plugin and traces is not None:
        raise UserError("--plugin and --traces: a plug-in drafts by the configuration as it is")
    if plugin and further:
        raise UserError("--plugin and --set: a plug-in drafts by the configuration as it is")
    from specdec_core.search.nearest import counterpart_or_nearest, rank
    from specdec_core.servers.table import server_of

    server = server_of(to, version, "plug_in" if plugin else None)
    choice, source, _ = choose(config)
    pair, configuration = choice.pair, choice.configuration
    if not configuration.lossless:
        raise UserError(
            f"{configuration.label} is lossy: {server.title} verifies every token, so it has no"
            " counterpart"
        )
    models = models_for(pair, server, plugin)
    if fastest:  # whatever the configuration is
        configuration = Configuration(sampling=configuration.sampling)
    else:
        print_configuration(configuration, source)
    find = partial(
        by_replay, pair=pair, configuration=configuration, traces=traces, profile=profile
    )
    if plugin:
        from specdec_core.servers.model_files import placed

        measured = server.measures and profile is None
        priced = configuration if measured else _priced(choice, profile)
        written = server.plugged_in(placed(priced), models, pair.runner)
    else:
        if fastest:
            from dashboards.outputs.console import table
            from dashboards.reports.ranking import ranking

            ranked = find(partial(rank, server, models), "--fastest is found by replay")
            console.print(table(ranking(ranked[:SHOWN])))
            console.print(f"the fastest of {len(ranked)} settings of {server.title}, by replay")
            counterpart, _ = counterpart_or_nearest(server, models, ranked[0].configuration, find)
        else:
            counterpart, nearest = counterpart_or_nearest(server, models, configuration, find)
            if nearest is not None:
                say_nearest(server, configuration.drafter, nearest)
        if further:
            counterpart = server.with_more(counterpart, further)
        for remark in counterpart.remarks:
            console.print(f"{server.title} {escape(remark)}", soft_wrap=True)
        if not server.verified:
            console.print(f"{server.title} was not run with this: it follows the documentation")
        written = server.written(counterpart, models)
    _deliver(server, written, version, out or workspace() / "export" / f"{pair.name}-{to}")


def _priced(choice: PairConfiguration, profile: Path | None) -> Configuration:
    """The configuration at the forward costs that its policies need."""
    configuration = choice.configuration
    if not configuration.unpriced:
        return configuration
    from dashboards.progress import ConsoleProgress
    from specdec_core.measure.forward_times import forward_times
    from specdec_core.models.pair import resolve_dtypes

    drafts = configuration.drafts_of(choice.pair.drafts)
    pair = resolve_dtypes(choice.pair.model_copy(update={"drafts": drafts}))
    with ConsoleProgress(console) as progress:
        return configuration.priced(forward_times(pair, [], profile, progress))


def _deliver(server: Server, written: WrittenFiles, version: str | None, folder: Path) -> None:
    """Write the files, and show the commands that use them. A file of an earlier export to this
    server is replaced, or deleted where the new export has no such file."""
    from specdec_core.servers.server import USAGE

    before = folder / USAGE
    used = before.read_text() if before.exists() else ""
    for name in server.files:
        if name in used and name not in written.files:
            (folder / name).unlink(missing_ok=True)
    written.save(folder)
    for name in written.files:
        point("written", folder / name)
    point("for", f"{server.title} {version or server.version}")
    console.print(f"\n{escape(written.usage)}", soft_wrap=True)


def models_for(pair: PairSpec, server: Server, plug_in: bool = False) -> Models:
    """The places of the pair's models for another program, or for our `plug_in` in that program.
    Raises :class:`UserError` for a missing model."""
    with console.status("looking the models up"):
        from specdec_core.servers.model_files import models_of  # torch takes a second

        return models_of(pair, server, plug_in)


def by_replay(
    find: Callable[[Replay, Profile, Observer], T],
    why: str,
    pair: PairSpec,
    configuration: Configuration,
    traces: str | None = None,
    profile: Path | None = None,
) -> T:
    """The result of `find` for a replay and the forward times: of the recording `traces`, or of the
    pair's latest recording, preferably under the configuration's sampling. Raises
    :class:`UserError` without a recording, with the reason `why` it is needed, for a recording of
    other weights, and for a `profile` that lacks a draft of the configuration."""
    from dashboards.progress import ConsoleProgress
    from specdec_core.drafting.trained import weights_here
    from specdec_core.measure.forward_times import forward_times, timed
    from specdec_core.recordings.find import latest_recording
    from specdec_core.recordings.replay import Replay
    from specdec_core.search.replaying import find_named

    with ConsoleProgress(console) as progress:
        recording = (
            latest_recording(pair, workspace(), configuration.sampling)
            if traces is None
            else find_named(traces, workspace())
        )
        if recording is None:
            raise UserError(
                f"{why}, and no recording of {pair.name} is there to replay: make one with"
                " `specdec record`"
            )
        recording.check(weights_here(pair, ()) or {})
        header, of = recording.header, recording.header.pair
        if header.sampling != configuration.sampling:
            progress.warned(
                f"by replay of {recording.folder.name}, which has another sampling than the"
                " configuration"
            )
        if profile is not None:
            of = timed(of, profile, progress, configuration.drafts_of(pair.drafts))
        times = forward_times(of, [], profile, progress, header.fingerprints)
        replay = Replay(recording, hidden=configuration.reads_hidden, profile=times)
        return find(replay, times, progress)


def say_nearest(server: Server, asked: DrafterSettings | None, nearest: Nearest) -> None:
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
