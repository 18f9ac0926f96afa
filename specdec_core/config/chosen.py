"""A pair and a configuration for it, as they are kept in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.config.base import Value, load_yaml, parse
from specdec_core.config.configuration import Configuration
from specdec_core.config.pair import PairSpec


class PairConfiguration(Value):
    """A pair and the configuration to decode with, as in a YAML file for `--config`."""

    pair: PairSpec = PairSpec()
    configuration: Configuration

    @classmethod
    def load(cls, path: Path | str, check: bool = True) -> Self:
        """Read a file. Raises :class:`UserError` for anything wrong in it; without `check`, not yet
        for a draft model that the pair lacks."""
        content = load_yaml(path)
        _check_kind_of_file(content, path)
        chosen = parse(cls, content, str(path))
        if check:
            chosen.check(str(path))
        return chosen

    def check(self, source: str) -> None:
        """Raises :class:`UserError`, naming `source`, where the pair lacks a draft model that the
        configuration needs."""
        self.configuration.check_drafts(self.pair.drafts, f"{source}: configuration")

    def save(self, path: Path) -> Path:
        return write_atomically(path, self.to_yaml())


def _check_kind_of_file(content: Any, path: Path | str) -> None:
    """Raises :class:`UserError` for a file of another kind that is easily taken for this one."""
    if not isinstance(content, Mapping) or "configuration" in content:
        return
    if "search" in content:
        raise UserError(
            f"{path}: a sweep file, which `specdec sweep` takes; expected `pair:` and"
            " `configuration:`"
        )
    if set(content) & set(Configuration.model_fields):
        raise UserError(
            f"{path}: expected `pair:` and `configuration:`; put what a configuration has (drafter,"
            " sampling) under `configuration:`"
        )
