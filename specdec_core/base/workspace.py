"""Where runs leave their files: MLflow's store, sweeps, reports."""

from __future__ import annotations

import json
import os
from pathlib import Path

from specdec_core.base.errors import UserError, os_reason
from specdec_core.base.files import write_atomically

_PLACES = ".specdec-places"


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
        raise UserError(
            f"cannot use {folder} as the workspace (SPECDEC_HOME): {os_reason(error)}"
        ) from None
    return folder.resolve()


def remember(home: Path) -> None:
    """Note where the workspace `home` is, for :func:`present_path`: what is written in it may name
    files by this place."""
    if str(home) not in (places := _places(home)):
        write_atomically(home / _PLACES, "\n".join([*places, str(home)]) + "\n")


def present_path(name: str) -> str:
    """A path with `~` expanded. A missing path in a former place of the workspace becomes the same
    path in the present one, if that exists. Any other name is unchanged."""
    path = os.path.expanduser(name)
    if os.path.isabs(path) and not os.path.exists(path):
        home = workspace()
        for place in _places(home):
            if path.startswith(f"{place}/") and (led := home / path[len(place) + 1 :]).exists():
                return str(led)
    return path


def as_first_placed(text: str) -> str:
    """JSON with the paths in the workspace as they were at its first place: the same wherever it
    lies."""
    home = workspace()
    first = (*_places(home), str(home))[0]
    return text.replace(json.dumps(f"{home}/")[1:-1], json.dumps(f"{first}/")[1:-1])


def _places(home: Path) -> list[str]:
    """Where the workspace was used, its first place first."""
    file = home / _PLACES
    return file.read_text().splitlines() if file.exists() else []


def kept_folder(kind: str) -> Path:
    """Where what was compiled is kept for all workspaces: `specdec/<kind>` in the user's cache
    folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "specdec" / kind


def _uploaded(folder: Path) -> bool:
    """Whether `folder` lies in what Ray unpacked from a job's `--working-dir`."""
    return "working_dir_files" in folder.parts and any(
        part.startswith("_ray_pkg_") for part in folder.parts
    )
