"""Frozen values, and reading them from files and other input."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from specdec_core.base.errors import UserError, os_reason
from specdec_core.base.files import write_atomically
from specdec_core.base.names import digest_name
from specdec_core.config.expected import expected, written

T = TypeVar("T")

# The keys by which a configuration names what it reads beside its models, or the place of that.
READ = ("head", "state", "table")


class Value(BaseModel):
    """A frozen value that rejects unknown keys. Its JSON has NaN and infinities as such."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


class Document(BaseModel):
    """A value that is written to disk as JSON and read again, NaN and infinities too; it rejects
    unknown keys."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class Stored(Document):
    """A document that is the file :attr:`FILE` of a folder; messages call it :attr:`WHAT`."""

    FILE: ClassVar[str]
    WHAT: ClassVar[str]

    def save(self, folder: Path) -> Path:
        return write_atomically(folder / self.FILE, self.model_dump_json(indent=1))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what `save` wrote. Raises :class:`UserError` where there is nothing, or it cannot be
        read."""
        file = Path(folder) / cls.FILE
        try:
            return parse_json(cls, file.read_bytes(), str(file))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{folder}: no {cls.WHAT} in it (no {cls.FILE})") from None
        except OSError as error:
            raise UserError(f"{file}: {os_reason(error)}") from None


def identity(value: BaseModel, placeless: bool = False) -> str:
    """A value's stable short id: the hash of its canonical JSON. A `placeless` one is the same
    wherever what it reads (:data:`READ`) lies."""
    content = value.model_dump(mode="json")
    if placeless:
        content = with_read(
            content,
            lambda _, place: Path(place.removeprefix("bundled:")).name.removesuffix(".json"),
        )
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return digest_name(canonical)[:10]


def with_read(part: Any, change: Callable[[str, str], str]) -> Any:
    """JSON content with each value at a key of :data:`READ` changed by `change(key, value)`."""
    if isinstance(part, list):
        return [with_read(each, change) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        key: change(key, value)
        if key in READ and isinstance(value, str)
        else with_read(value, change)
        for key, value in part.items()
    }


def parse(kind: type[T], value: Any, source: str) -> T:
    """Validate `value` as `kind`; a mismatch is a :class:`UserError` of one line that names
    `source`, the key and what would be right."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise UserError(f"{source}: {describe(error, kind, value)}") from None


def parse_json(kind: type[T], text: str | bytes, source: str) -> T:
    """:func:`parse` of JSON."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        raise UserError(f"{source}: {describe(error, kind)}") from None


def describe(error: ValidationError, kind: Any = None, value: Any = None) -> str:
    """A pydantic error as one line; of a `value` that was read as a `kind`, with the keys that
    would have been right."""
    parts = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in written(item["loc"], value)) or "value"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = f"unknown key{expected(kind, value, item['loc'])}"
        else:
            if item["type"] == "model_type":
                message = expected(kind, value, item["loc"], whole=True) or message
            if item["type"] != "missing" and not isinstance(item["input"], dict):
                message += f" (got {item['input']!r})"
        parts.append(f"{where}: {message}")
    return "; ".join(parts)


def load_yaml(path: str | Path) -> Any:
    """Read a file of YAML or JSON. Raises :class:`UserError` where it cannot be read or is
    malformed."""
    path = Path(path)
    try:
        text = path.read_text()
        with suppress(json.JSONDecodeError):
            return json.loads(text)  # all JSON is YAML, but is read much faster as JSON
        return yaml.load(text, _Loader)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: a folder, expected a YAML file") from None
    except OSError as error:
        raise UserError(f"{path}: {os_reason(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no such date
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


class _Loader(yaml.SafeLoader):
    """PyYAML's own keeps the last of two equal keys without a word; this one refuses them."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                reason = f"the key {key.value!r} is there twice"
                raise yaml.MarkedYAMLError(problem=reason, problem_mark=key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


def overridden(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A file's `content` with other top-level values: a mapping key by key, and so a pair's
    runner."""
    changed = dict(content)
    for key, value in overrides.items():
        old = changed.get(key)
        if not isinstance(old, Mapping) or not isinstance(value, Mapping):
            changed[key] = value
            continue
        changed[key] = {**old, **value}
        if isinstance(runner := old.get("runner"), Mapping) and "runner" in value:
            changed[key]["runner"] = {**runner, **value["runner"]}
    return changed
