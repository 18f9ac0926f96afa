"""Texts for a datastore, and their tokens: bundled ones, files, folders, and recorded outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.prompts import stdlib
from specdec_core.prompts.prompt_sets import file_records
from specdec_core.recordings.schema import Recording

# `train` leaves out the modules of the bundled prompts `seen`: a datastore of it has never seen
# what is measured, neither there nor on `held_out`.
BUNDLED = ("bundled:train", "bundled:seen", "bundled:held_out")
_KEYS = ("text", "prompt", "completion")
_AT_ONCE = 64  # texts


def read_texts(source: str) -> Iterator[str]:
    """The texts of `source`: one of :data:`BUNDLED` (modules of the standard library), a `.jsonl`
    file of records with a `text`, or a `prompt` and its `completion`, a text file, or a folder of
    these.

    Raises:
        UserError: there is no such source, or a file cannot be read.
    """
    path = Path(source).expanduser()
    if source.startswith("bundled:"):
        yield from _bundled(source)
    elif path.is_dir():
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not hidden:
                yield from _file(file, skip_binary=True)
    elif path.exists():
        yield from _file(path)
    else:
        raise UserError(
            f"{source}: no such file or folder; a corpus is {', '.join(BUNDLED)}, a .jsonl file or"
            " a folder of texts"
        )


def encode(
    texts: Iterable[str], tokenizer: Any, observer: Observer | None = None
) -> Iterator[list[int]]:
    """The tokens of each text, without special ones. A step of the observer is a text."""
    texts = iter(texts)
    while batch := list(islice(texts, _AT_ONCE)):
        encoded = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        for tokens in encoded:
            if observer:
                observer.step()
            yield tokens


def recorded(recording: Recording, observer: Observer | None = None) -> Iterator[Sequence[int]]:
    """The recorded prompts, each with the target's output."""
    prompts = recording.prompts
    for prompt, output in zip(prompts.tokens, prompts.outputs, strict=True):
        if observer:
            observer.step()
        yield [*prompt.tolist(), *output.tolist()]


def _bundled(source: str) -> Iterator[str]:
    if source not in BUNDLED:
        raise UserError(f"{source}: no such bundled corpus; there are {', '.join(BUNDLED)}")
    train = source == "bundled:train"
    left_out = {r.module for r in stdlib.load_references("seen")} if train else set()
    for module in stdlib.modules_of("held_out" if source == "bundled:held_out" else "seen"):
        if module not in left_out:
            yield stdlib.module_source(module)


def _file(path: Path, skip_binary: bool = False) -> Iterator[str]:
    if path.suffix == ".jsonl":
        yield from _records(path)
        return
    try:
        yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        if not skip_binary:
            raise UserError(f"{path}: not UTF-8 text") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{path}: cannot be read, {reason}") from None


def _records(path: Path) -> Iterator[str]:
    for where, record in file_records(path):
        parts = [record.get(key) for key in _KEYS] if isinstance(record, dict) else []
        text = "".join(part for part in parts if isinstance(part, str))
        if not text:
            raise UserError(f"{where}: expected an object with a `text`, or a `prompt`")
        yield text
