"""Models read by libraries: whatever a library raises becomes one line, and weights that do not fit
their model are refused, where transformers would draw random ones."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from threading import RLock
from typing import Any

from safetensors import SafetensorError

from specdec_core.base.errors import UserError, os_reason

CONFIG = "config.json"  # of a model's folder
ONE_AT_A_TIME = RLock()  # transformers changes its classes, for all threads, while it makes a model

# Lines of a library's error that say what to do rather than what is wrong.
_ADVICE = re.compile(r"(Please|Check|If|You|See|For details|Do|Note) |\(\d+\)|<https?:|https?:")
_KIND = re.compile(r"^\w+(Error|Exception): ")
_POINTER = b"version https://git-lfs"
_DAMAGED = (SafetensorError, UnpicklingError, EOFError)
_VAGUE = (KeyError, IndexError, AttributeError, TypeError, AssertionError)
# Old checkpoints hold tables that models now compute: masks and rotary frequencies.
COMPUTED = re.compile(r"(attn|attention)\.(masked_)?bias$|causal_mask$|inv_freq$")
_NAMED = 3  # tensors in a line


def reason(error: BaseException) -> str:
    """The cause in the words of the library that raised `error`: the last line of its message that
    is no advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not _ADVICE.match(line)] or lines
    if not said:
        return type(error).__name__
    if isinstance(error, _VAGUE):
        return f"{type(error).__name__}: {said[-1]}"
    return _KIND.sub("", said[-1])


@contextmanager
def reading(name: str, doing: str, path: str | Path | None = None) -> Iterator[None]:
    """Turns whatever the block raises into a :class:`UserError` of one line: which model, what
    cannot be done, the cause and what would be right. `path` is the model's folder, or one of its
    files, if it has any here."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name}: cannot {doing}: {_explained(error, path)}") from None


def _explained(error: Exception, where: str | Path | None) -> str:
    """The cause, and what would be right where that is known."""
    path, config = Path(where or os.devnull), dict[str, Any]()
    with suppress(UserError):
        config = read_config(path, "")
    said = reason(error)
    files = [path] if path.is_file() else sorted(path.glob("*.*"))
    if pointer := next(filter(_is_pointer, files), None):
        return f"{pointer.name} is a Git-LFS pointer, not the file itself; fetch it (git lfs pull)"
    if "trust_remote_code" in str(error):
        return (
            "it brings code of its own (trust_remote_code), which this engine never runs, and no"
            " option changes that; take a model of transformers' own, or a server that runs such"
            " code (vLLM --trust-remote-code)"
        )
    quantised = config.get("quantization_config")
    if isinstance(error, ImportError) and isinstance(quantised, dict):
        return (
            f"it is quantised ({quantised.get('quant_method')}): {said}; or take a checkpoint that"
            " is not quantised, or serve this one with vLLM"
        )
    damaged = isinstance(error, _DAMAGED) or "PytorchStreamReader" in said
    if damaged or (isinstance(error, OSError) and error.errno and not error.filename):
        return f"{said}; a file is damaged, cut off or holds more than tensors: fetch it again"
    value = error.name if isinstance(error, AttributeError) else next(iter(error.args), None)
    for part in (config, *(each for each in config.values() if isinstance(each, dict))):
        if isinstance(error, _VAGUE) and value in (values := list(part.values())):
            return f"config.json: {list(part)[values.index(value)]}: {value!r} is not known"
    if isinstance(error, _VAGUE):
        return f"{said} (a file is damaged, or of another version of transformers)"
    if "tokenizer" in said and path.is_dir() and not (path / "tokenizer.json").exists():
        return f"{said} there is no tokenizer.json in the folder"
    return said


def _is_pointer(file: Path) -> bool:
    """Whether Git has left a pointer in place of a large file."""
    try:
        with file.open("rb") as content:
            return content.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """A folder's `config.json`. Raises :class:`UserError` where there is none."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{name}: {CONFIG}: {os_reason(error)}") from None
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise UserError(f"{name}: {CONFIG} is not a JSON object")
    return config


def read_model(
    factory: Any, path: str | Path, name: str, known: Collection[str] = (), **options: Any
) -> Any:
    """`factory.from_pretrained`, refused where transformers' loading report says that the weights
    are not the model's; in evaluation mode.

    Args:
        factory: a model's class, or transformers' own that chooses one.
        path: the model's folder or hub id.
        name: what errors call it.
        known: names of tensors to ignore that the model does not have.
        options: for `from_pretrained`.

    Raises:
        UserError: the weights cannot be read, or some are missing, unexpected or of other shapes.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logger, report = logging.getLogger("transformers.modeling_utils"), _Report()
    logger.addFilter(report)
    try:
        with ONE_AT_A_TIME, reading(name, "load its weights", path):
            model, loaded = factory.from_pretrained(
                path,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # all of them are named here
                trust_remote_code=False,
                **options,
            )
    except UserError:
        if failed := [line for line in report.text.splitlines() if line.startswith("Error")]:
            raise UserError(f"{name}: cannot load its weights: {failed[0]}") from None
        raise
    finally:
        logger.removeFilter(report)
    shapes = {key: (tuple(own), tuple(wanted)) for key, own, wanted in loaded["mismatched_keys"]}
    unexpected = (key for key in loaded["unexpected_keys"] if not COMPUTED.search(key))
    check_fit(name, loaded["missing_keys"], set(unexpected).difference(known), shapes)
    return model.eval()


class _Report(logging.Filter):
    """Keeps transformers' loading report, a table of many lines, from the log."""

    text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "LOAD REPORT" not in message:
            return True
        self.text = message
        return False


def check_fit(
    name: str,
    missing: Collection[str],
    unknown: Collection[str],
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    """Raises :class:`UserError` for tensors that a model lacks (`missing`) or does not know
    (`unknown`), and for different `shapes` (the file's, the model's). It names the first few and
    their number."""
    differing = [f"{k} has the shape {own}, not {s}" for k, (own, s) in sorted(shapes.items())]
    faults = (
        ("missing tensors: ", sorted(missing)),
        ("unknown tensors: ", sorted(unknown)),
        ("", differing),
    )
    said = [
        what
        + ", ".join(found[:_NAMED])
        + (f", … ({len(found)} in all)" if len(found) > _NAMED else "")
        for what, found in faults
        if found
    ]
    if said:
        raise UserError(f"{name}: its weights do not fit its configuration: {'; '.join(said)}")
