"""Which of the recordings on disk is of these models, prompts and settings?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.config import Sampling
from specdec_core.recordings.schema import HEADER, Recording

FINISHED = "finished"


def finish(folder: Path) -> None:
    """Mark the recording in `folder` as whole."""
    write_atomically(folder / FINISHED, "")


def finished(folder: Path) -> bool:
    """Whether every prompt of the recording in `folder` is on disk."""
    return (folder / FINISHED).exists()


def open_named(name: str, home: Path) -> Recording:
    """The recording in the folder `name`, or of that name in the workspace `home`. Raises
    :class:`UserError` where there is none."""
    folder, named = Path(name).expanduser(), home / "traces" / name
    return Recording.open(named if not folder.exists() and named.exists() else folder)


def find_recording(
    root: Path,
    fingerprints: Mapping[str, str],
    prompts_digest: str,
    sampling: Sampling,
    max_new_tokens: int,
    dtypes: tuple[str, str],
) -> Recording | None:
    """The finished, replayable recording under `root` of the models with these `fingerprints` (by
    name: `target` and the drafts; it may hold other drafts, too), of the prompts with this digest
    (:func:`specdec_core.prompts.prompt_sets.digest`), in these data types of target and drafts. Of
    several,
    the one with the longest drafts; None where there is none."""
    found = []
    for file in sorted(root.glob(f"*/{HEADER}")):
        try:
            recording = Recording.open(file.parent)
        except UserError:  # of another version, or not ours
            continue
        header = recording.header
        runner = header.pair.runner
        if (
            finished(file.parent)
            and header.replayable
            and fingerprints.items() <= header.fingerprints.items()
            and header.prompts.digest == prompts_digest
            and header.sampling == sampling
            and header.max_new_tokens == max_new_tokens
            and (runner.target_dtype, runner.draft_dtype) == tuple(dtypes)
        ):
            found.append(recording)
    return max(found, key=lambda recording: recording.header.max_draft, default=None)
