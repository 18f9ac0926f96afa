"""Finding a recording on disk, by name or by models, prompts and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.base.workspace import present_path
from specdec_core.config import PairSpec, RunnerSettings, Sampling
from specdec_core.drafting.trained import weights_here
from specdec_core.recordings.schema import HEADER, Header, Recording

FINISHED = "finished"


def finish(folder: Path) -> None:
    """Mark the recording in `folder` as whole."""
    write_atomically(folder / FINISHED, "")


def finished(folder: Path) -> bool:
    """Whether every prompt of the recording in `folder` is on disk."""
    return (folder / FINISHED).exists()


def open_named(name: str, home: Path) -> Recording:
    """The recording in the folder `name`, or of that name in the workspace `home`. Raises
    :class:`UserError` where there is none that is finished."""
    folder, named = Path(present_path(name)), home / "traces" / name
    if folder.exists() or named.exists():
        recording = Recording.open(folder if folder.exists() else named)
        if not finished(recording.folder):
            raise UserError(f"{recording.folder}: not finished; the same `specdec record` goes on")
        return recording
    there = sorted(file.parent.name for file in (home / "traces").glob(f"*/{HEADER}"))
    raise UserError(
        f"{name}: no such folder, and no recording of that name in {home / 'traces'} (there are:"
        f" {', '.join(there) or 'none'}); `specdec record` makes one"
    )


def find_recording(
    root: Path,
    fingerprints: Mapping[str, str],
    prompts_digest: str,
    sampling: Sampling,
    max_new_tokens: int,
    runner: RunnerSettings,
) -> Recording | None:
    """A finished, replayable recording under `root`; None where there is none. Of several, one by
    the same kind of forwards comes first, and then the one with the longest drafts. None is of a
    server's answers: its target may be a quantised or adapted copy of the weights here.

    Args:
        fingerprints: of `target` and the drafts, by name; the recording may hold other drafts too.
        prompts_digest: see :func:`specdec_core.prompts.prompt_sets.digest`.
        runner: has the data types of target and drafts, where `auto` is any, and says whether
            forwards are compiled graphs, which round otherwise than eager ones.
    """

    def matches(header: Header) -> bool:
        recorded = header.pair.runner
        return (
            header.replayable
            and header.served is None
            and fingerprints.items() <= header.fingerprints.items()
            and header.prompts.digest == prompts_digest
            and header.sampling == sampling
            and header.max_new_tokens == max_new_tokens
            and runner.target_dtype in ("auto", recorded.target_dtype)
            and runner.draft_dtype in ("auto", recorded.draft_dtype)
        )

    def fits(recording: Recording) -> tuple[bool, int]:
        header = recording.header
        return header.pair.runner.compile == runner.compile, header.max_draft

    return max((r for r in _finished(root) if matches(r.header)), key=fits, default=None)


def latest_recording(
    pair: PairSpec, home: Path, sampling: Sampling, drawn: bool = False
) -> Recording | None:
    """The latest finished recording of a pair that can be replayed, with `drawn` also by drawing
    its rounds; recordings under `sampling` come first. None if there is none.

    Models are compared by their weights, or by their names where the weights are not on this
    machine. A recording of a server's answers is only found where they are not."""
    prints = weights_here(pair, ())
    own = [
        recording
        for recording in _finished(home / "traces")
        if (recording.header.replayable or (drawn and recording.header.continuations))
        and _is_of(recording, pair, prints)
    ]
    alike = [recording for recording in own if recording.header.sampling == sampling]
    return next(iter(alike or own), None)


def _is_of(recording: Recording, pair: PairSpec, prints: Mapping[str, str] | None) -> bool:
    recorded = recording.header
    if not pair.drafts.items() <= recorded.pair.drafts.items():
        return False
    if prints is None:
        return pair.target == recorded.pair.target
    return recorded.served is None and prints.items() <= recorded.fingerprints.items()


def _finished(root: Path) -> Iterator[Recording]:
    """The finished recordings under `root` that this version reads, the latest first."""
    for file in sorted(root.glob(f"*/{HEADER}"), key=lambda file: -file.stat().st_mtime):
        try:
            recording = Recording.open(file.parent)
        except UserError:  # of another version, or not a recording
            continue
        if finished(file.parent):
            yield recording
