"""A pair and a configuration for it, as they are kept in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import yaml

from specdec_core.base.files import write_atomically
from specdec_core.config.base import Value, load_yaml, parse
from specdec_core.config.configuration import Configuration
from specdec_core.config.pair import PairSpec


class PairConfiguration(Value):
    """A pair and the configuration to decode with, as in a YAML file for `--config`."""

    pair: PairSpec = PairSpec()
    configuration: Configuration

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a file. Raises :class:`UserError` for anything wrong in it."""
        return parse(cls, load_yaml(path), str(path))

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def save(self, path: Path) -> Path:
        return write_atomically(path, self.to_yaml())
