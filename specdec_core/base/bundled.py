"""The bundled models: a target with two drafts distilled from it, and an EAGLE head and a draft for
a target that `specdec fetch` installs. Their weights are stored compressed."""

import lzma
import shutil
from functools import cache
from pathlib import Path

from specdec_core.base.digests import files_digest
from specdec_core.base.errors import UserError, os_reason
from specdec_core.base.files import atomic_folder, made_once
from specdec_core.base.workspace import kept_folder, present_path

PAIR = ("target", "draft-medium", "draft-small")
FOR_FETCHED = ("smollm2-eagle", "smollm2-draft")
STORED = Path(__file__).parents[1] / "bundled" / "weights"
_COMPRESSED = ".xz"


@cache
def bundled_path(name: str) -> Path:
    """Folder of a bundled model, in Hugging Face format. A model of the pair has its tokenizer; a
    head or a draft of a fetched target uses the target's.

    A missing folder is unpacked from :data:`STORED` into the user's cache, by one process at a
    time, and kept by the stored files' contents.

    Raises `UserError` (a `ValueError`) naming the known models for any other name, for a damaged
    stored file, and for a cache that cannot be written.
    """
    known = (*PAIR, *FOR_FETCHED)
    if name not in known:
        raise UserError(f"unknown bundled model {name!r}; known: {', '.join(known)}")
    files = sorted((STORED / name).iterdir())
    folder = kept_folder("models") / f"{name}-{files_digest(files)}"

    def unpack() -> None:
        with atomic_folder(folder) as new:
            for file in files:
                _unpack(file, new)

    try:
        return made_once(folder, unpack)
    except OSError as error:
        if isinstance(error, UserError):  # no room
            raise
        raise UserError(
            f"{folder}: cannot be written ({os_reason(error)}); set XDG_CACHE_HOME to a folder"
            " that can be"
        ) from None


def _unpack(file: Path, folder: Path) -> None:
    if file.suffix != _COMPRESSED:
        shutil.copyfile(file, folder / file.name)
        return
    with lzma.open(file) as compressed, (folder / file.stem).open("wb") as weights:
        try:
            shutil.copyfileobj(compressed, weights)
        except (lzma.LZMAError, EOFError):
            raise UserError(f"{file}: damaged or cut off; install or check it out again") from None


def resolve_path(name: str) -> str:
    """The folder of a bundled model; any other name as :func:`present_path` has it."""
    if not name.startswith("bundled:"):
        return present_path(name)
    return str(bundled_path(name.removeprefix("bundled:")))
