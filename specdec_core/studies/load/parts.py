"""What is measured of a comparison under load, kept until it is whole.

    <folder>/comparison.json   what is compared, and the digest of it
    <folder>/<turn>-<n>.json   the run of contestant n in a turn: its records

Every file is written whole or not at all, so a run is there or was not made.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from specdec_core.base.files import locked, write_atomically
from specdec_core.studies.load.requests import LoadRecord

_RECORDS = TypeAdapter(list[LoadRecord])


@dataclass(frozen=True)
class LoadParts:
    """The runs of one comparison in a folder of their own."""

    folder: Path

    @classmethod
    @contextmanager
    def open(cls, root: Path, what: Mapping[str, Any], fresh: bool = False) -> Iterator[LoadParts]:
        """The runs of the comparison that `what` describes, all of it in JSON: those that an
        interrupted one left below `root`, unless `fresh`. Another description has other runs.
        Raises :class:`UserError` where another process measures the same."""
        text = json.dumps(what, sort_keys=True, indent=1)
        parts = cls(root / f".{hashlib.sha256(text.encode()).hexdigest()[:16]}")
        with locked(parts.folder, "comparison"):
            if fresh:
                for run in parts._runs():
                    run.unlink()
            write_atomically(parts.folder / "comparison.json", text)
            yield parts

    def get(self, turn: int, contestant: int) -> list[LoadRecord] | None:
        """The records of a run that was kept; None of one that was not."""
        path = self._path(turn, contestant)
        return _RECORDS.validate_json(path.read_bytes()) if path.exists() else None

    def keep(self, turn: int, contestant: int, records: Sequence[LoadRecord]) -> None:
        """Keep the records of a run."""
        text = _RECORDS.dump_json(list(records)).decode()
        write_atomically(self._path(turn, contestant), text)

    @property
    def times(self) -> list[datetime]:
        """When each kept run ended, in order."""
        return sorted(datetime.fromtimestamp(p.stat().st_mtime, UTC) for p in self._runs())

    def remove(self) -> None:
        """Forget the runs: the comparison is whole."""
        shutil.rmtree(self.folder)

    def _runs(self) -> list[Path]:
        return list(self.folder.glob("[0-9]*-[0-9]*.json"))

    def _path(self, turn: int, contestant: int) -> Path:
        return self.folder / f"{turn}-{contestant}.json"
