"""Where runs leave their files: MLflow's store, sweeps, reports."""

from __future__ import annotations

import os
from pathlib import Path

from specdec_core.base.errors import UserError


def workspace() -> Path:
    """The folder for everything that a run leaves behind; created where it is missing.

    `SPECDEC_HOME` where it is set. Else `~/.specdec` in a Ray job that runs in its uploaded copy
    of a working folder, because Ray deletes that copy. Else the current folder. Ray moves a Tune
    trial to a folder of its own, so ask in the driver and hand the answer on.
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


def _uploaded(folder: Path) -> bool:
    """Whether `folder` lies in what Ray unpacked from a job's `--working-dir`."""
    return "working_dir_files" in folder.parts and any(
        part.startswith("_ray_pkg_") for part in folder.parts
    )
