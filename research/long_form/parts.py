"""The texts of a long-form run that are decoded, kept until it is whole: one takes minutes.

    <folder>/<digest>.parquet     its rounds, and its tokens in the schema's metadata

The digest is of all that a text and its times depend on: a run with other settings decodes its own.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specdec_core.base.files import atomic_path
from specdec_core.config import Configuration
from specdec_core.drafting.trained import trained_digests
from specdec_core.engine import Request
from specdec_core.models.pair import Pair

_TOKENS = b"tokens"


@dataclass(frozen=True)
class LongText:
    """A text that a configuration has written: its rounds, but for the first, and new tokens."""

    rounds: pd.DataFrame
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class LongTexts:
    """The texts of a pair in a folder."""

    folder: Path
    pair: Pair

    def get(self, configuration: Configuration, request: Request, repeat: int) -> LongText | None:
        """The text that was kept; None of one that was not."""
        path = self._path(configuration, request, repeat)
        if not path.exists():
            return None
        table = pq.read_table(path)
        tokens = json.loads(table.schema.metadata[_TOKENS])
        return LongText(table.to_pandas(), tuple(tokens))

    def keep(
        self, configuration: Configuration, request: Request, repeat: int, text: LongText
    ) -> None:
        """Keep a text."""
        table = pa.Table.from_pandas(text.rounds, preserve_index=False)
        tokens = json.dumps(text.tokens).encode()
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(self._path(configuration, request, repeat)) as path:
            described = {**(table.schema.metadata or {}), _TOKENS: tokens}
            pq.write_table(table.replace_schema_metadata(described), path)

    def remove(self, configuration: Configuration, request: Request, repeat: int) -> None:
        """Forget a text."""
        self._path(configuration, request, repeat).unlink(missing_ok=True)

    def _path(self, configuration: Configuration, request: Request, repeat: int) -> Path:
        what = {
            "models": self.pair.fingerprints | trained_digests([configuration]),
            "runner": self.pair.spec.runner.model_dump(mode="json"),
            "configuration": configuration.model_dump(mode="json"),
            "prompt": list(request.tokens),
            "new": request.max_new_tokens,
            "seed": request.seed,
            "repeat": repeat,
        }
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
        return self.folder / f"{digest}.parquet"
