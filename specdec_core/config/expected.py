"""Which keys would have been right in place of unknown ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel


def expected(kind: Any, value: Any, path: Sequence[str | int], whole: bool = False) -> str:
    """What should be at `path` of a `value` that was read as a `kind`, as the end of a message: the
    key like the last of the path or else all that there are; with `whole`, a mapping's first key.
    Empty where that cannot be told."""
    for model in _models_at(kind, value, path if whole else path[:-1]):
        keys = list(model.model_fields)
        if whole:
            return f"expected {{{keys[0]}: …}}" if keys else ""
        if near := get_close_matches(str(path[-1]), keys, 1):
            return f"; did you mean {near[0]}?"
        return f"; there are {', '.join(keys)}" if keys else ""
    return ""


def written(path: Sequence[str | int], value: Any) -> list[str | int]:
    """An error's path in the user's `value`: without pydantic's names for the members of a
    union."""
    kept: list[str | int] = []
    for part in path:
        inside = isinstance(value, Mapping) or (
            isinstance(value, list | tuple) and isinstance(part, int)
        )
        if not inside and value is not None:
            continue
        kept.append(part)
        value = _member(value, part)
    return kept


def _member(value: Any, part: str | int) -> Any:
    """What is at `part` of a value; None where that cannot be told."""
    if isinstance(value, Mapping):
        return value.get(part)
    if isinstance(value, list | tuple) and isinstance(part, int) and part < len(value):
        return value[part]
    return None


def _models_at(kind: Any, value: Any, path: Sequence[str | int]) -> Iterator[type[BaseModel]]:
    """The models that what is at `path` may have been read as."""
    for part in path:
        fields = [
            field
            for model in _models(kind, value)
            if (field := model.model_fields.get(str(part))) is not None
        ]
        # A part of the path that is no field is in a list or a mapping of such values.
        if fields:
            kind = Annotated[fields[0].annotation, *fields[0].metadata, None]
        value = _member(value, part)
    yield from _models(kind, value)


def _models(kind: Any, value: Any) -> Iterator[type[BaseModel]]:
    """The models among the parts of a type; of several kinds, the one that `value` names."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    elif get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        chosen = [note for note in notes if hasattr(note, "model_of")]
        for note in chosen:
            if (model := note.model_of(value)) is not None:
                yield model
        if not chosen:
            yield from _models(inner, value)
    else:
        for inner in get_args(kind):
            yield from _models(inner, value)
