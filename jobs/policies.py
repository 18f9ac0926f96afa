"""Compare length policies on recordings, by replay alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.console import console, run
from jobs.times import forward_times
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import Progress

    from specdec_core.config import Configuration
    from specdec_core.cost import Profile
    from specdec_core.recordings.replay import Replay
    from specdec_core.recordings.schema import Recording
    from specdec_core.studies.policies import Compared

POLICIES = Path(__file__).with_name("sweeps") / "policies.yaml"


def main(
    traces: Annotated[
        list[str], typer.Option(help="recording, a folder or a name; may be repeated")
    ],
    search: Annotated[
        Path, typer.Option(help="sweep file whose search to replay; a grid or random")
    ] = POLICIES,
    hardware: Annotated[
        Path | None, typer.Option(help="forward times of another machine (YAML)")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="the pair's forward times; unset, the workspace's, measured if missing"),
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the result's folder")] = None,
) -> None:
    """Replay more than a thousand length policies on recordings of a pair, and show the best of
    each family, the oracle, and how what is chosen on one recording does on another.

    Times are modelled: counts of forwards times a profile's seconds (SpecDec++, Eq. 3.1).
    """
    if hardware is not None and profile is not None:
        raise UserError("--hardware and --profile both give forward times: give one")
    if name is not None and (name == ".." or Path(name).name != name):
        raise UserError(f"--name {name}: expected a folder's name, not a path")

    # torch and MLflow take seconds to import.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dashboards import policies as shown
    from specdec_core.base.files import write_atomically
    from specdec_core.recordings.replay import Replay
    from specdec_core.studies.policies import best_of_families, everything, transfers

    recordings = open_recordings(traces)
    searches = [configurations(search, recording) for recording in recordings.values()]
    replays = [Replay(recording) for recording in recordings.values()]
    pair = next(iter(recordings.values())).header.pair
    wanted = [configuration for own in searches for configuration in own]
    times = forward_times(pair, wanted, hardware, profile)

    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    started = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as progress:
        sets = [
            replay_all(label, replay, own, times, progress)
            for label, replay, own in zip(recordings, replays, searches, strict=True)
        ]
    seconds = time.perf_counter() - started

    best, moved = best_of_families(sets), transfers(sets)
    for recording, draft in best[["recording", "draft"]].drop_duplicates().itertuples(index=False):
        console.print(shown.families_table(best, recording, draft))
    if len(sets) > 1:
        for draft in moved["draft"].unique():
            console.print(shown.transfer_table(moved, draft))
    for line in shown.headline(best):
        console.print(line, soft_wrap=True)

    count = sum(len(compared.trials) for compared in sets)
    saved = sum(t.counts["n_draft"] + t.counts["n_target"] for c in sets for t in c.trials)
    notes = [
        f"{count:,} replays in {seconds:.1f} s, {count / seconds:,.0f} a second; decoding would "
        f"have taken {saved:,} model forwards",
        f"forward times: {times.device}"
        + (f", target in {times.target_dtype}" if hardware is None else " (not this machine)"),
    ]
    folder = workspace() / "policies" / (name or "+".join(recordings))
    files = [
        write_atomically(folder / "configurations.csv", everything(sets).to_csv(index=False)),
        write_atomically(folder / "families.csv", best.to_csv(index=False)),
        write_atomically(folder / "transfer.csv", moved.to_csv(index=False)),
        write_atomically(folder / "policies.md", shown.markdown(best, moved, notes)),
        write_atomically(
            folder / "policies.json",
            json.dumps(
                {
                    "recordings": {n: str(r.folder.resolve()) for n, r in recordings.items()},
                    "seconds": seconds,
                    "configurations_per_second": count / seconds,
                    "profile": times.model_dump(mode="json"),
                    "families": json.loads(best.to_json(orient="records")),
                    "transfer": json.loads(moved.to_json(orient="records")),
                },
                indent=1,
            ),
        ),
    ]
    params = {"recordings": list(recordings), "search": str(search), "device": times.device}
    shown.log_policies(pair.name, f"policies on {folder.name}", params, best, moved, files)
    for note in notes:
        console.print(note, soft_wrap=True)
    console.print(f"tables    {folder}", soft_wrap=True)


def open_recordings(names: Sequence[str]) -> dict[str, Recording]:
    """The recordings by their prompts; raises :class:`UserError` unless they are of the
    same models."""
    from specdec_core.search.replaying import find_named

    found: dict[str, Recording] = {}
    for name in names:
        recording = find_named(name, workspace())
        own = recording.header.fingerprints
        if found:
            first = next(iter(found.values()))
            if own != first.header.fingerprints:
                raise UserError(f"{recording.folder} and {first.folder}: of different models")
        if any(recording.folder.samefile(other.folder) for other in found.values()):
            raise UserError(f"--traces {name}: it was given already")
        source = recording.header.prompts.source
        label = Path(source).stem.removeprefix("bundled:")
        if label in found:
            label = f"{label} {recording.folder.resolve().name[-8:]}"
        found[label] = recording
    return found


def configurations(search: Path, recording: Recording) -> list[Configuration]:
    """What `search` asks for, on what was recorded."""
    from specdec_core.search.plan import load_plan

    header = recording.header
    plan = load_plan(
        search,
        pair=header.pair.model_dump(),
        sampling=header.sampling.model_dump(),
        max_new_tokens=header.max_new_tokens,
    )
    found = plan.configurations
    if found is None:
        raise UserError(f"{search}: method: optuna chooses as it goes; give a grid or random")
    return found


def replay_all(
    name: str,
    replay: Replay,
    wanted: Sequence[Configuration],
    profile: Profile,
    progress: Progress,
) -> Compared:
    """Replay `wanted`; what the recording does not tell is left out, with a word."""
    from cluster.sweep.trial import context_of, replayed
    from specdec_core.studies.policies import Compared

    can = [configuration for configuration in wanted if replay.can(configuration)]
    if len(can) < len(wanted):
        left = len(wanted) - len(can)
        console.print(f"[yellow]warning:[/yellow] {name} does not tell {left} configurations")
    if not can:
        raise UserError(f"{replay.recording.folder}: tells none of the search's configurations")
    task = progress.add_task("", total=len(can))
    trials = []
    for configuration in can:
        trials.append(replayed(replay, configuration, profile))
        progress.advance(task)
    return Compared(name, trials, profile, context_of(replay))


if __name__ == "__main__":
    run(main)
