"""Where runs leave their files: MLflow's store, sweeps, reports."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec_core.base.errors import UserError


def workspace() -> Path:
    """The folder for all files of runs; created where it is missing.

    `SPECDEC_HOME` where it is set. Else `~/.specdec` in a Ray job that runs in its uploaded copy
    of a working folder, because Ray deletes that copy. Else the current folder. Ray moves a Tune
    trial to another folder, so call this in the driver and pass the result on.
    """
    if home := os.environ.get("SPECDEC_HOME"):
        folder = Path(home).expanduser()
    elif _uploaded(Path.cwd()):
        folder = Path.home() / ".specdec"
    else:
        return Path.cwd()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot use {folder} as the workspace (SPECDEC_HOME): {reason}") from None
    return folder.resolve()


def kept_folder(kind: str) -> Path:
    """Where what was compiled is kept for all workspaces: `specdec/<kind>` in the user's cache
    folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "specdec" / kind


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


def _uploaded(folder: Path) -> bool:
    """Whether `folder` lies in what Ray unpacked from a job's `--working-dir`."""
    return "working_dir_files" in folder.parts and any(
        part.startswith("_ray_pkg_") for part in folder.parts
    )
