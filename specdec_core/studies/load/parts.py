"""What is measured of a comparison under load, kept until it is whole.

    <folder>/comparison.json        what is compared; the folder's name is the digest of it
    <folder>/pair.json              the pair with the data types that every run uses
    <folder>/<turn>-<who>.json      the run of a contestant in a turn: its records

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
from specdec_core.config import PairSpec
from specdec_core.studies.comparison import Contender
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
        parts = cls(root / f".{_digest(text)}")
        with locked(parts.folder, "comparison"):
            if fresh:
                for file in parts.folder.glob("*.json"):
                    file.unlink()
            write_atomically(parts.folder / "comparison.json", text)
            try:
                yield parts
            finally:
                if not parts.times:
                    parts.remove()

    def pair(self, resolved: PairSpec) -> PairSpec:
        """The pair with the data types that the first run had; `resolved` where there was none.
        Automatic ones are measured, so they may be others each time."""
        path = self.folder / "pair.json"
        if path.exists():
            return PairSpec.model_validate_json(path.read_bytes())
        write_atomically(path, resolved.model_dump_json(indent=1))
        return resolved

    def get(self, turn: int, who: Contender) -> list[LoadRecord] | None:
        """The records of a run that was kept; None of one that was not."""
        path = self._path(turn, who)
        return _RECORDS.validate_json(path.read_bytes()) if path.exists() else None

    def keep(self, turn: int, who: Contender, records: Sequence[LoadRecord]) -> None:
        """Keep the records of a run."""
        text = _RECORDS.dump_json(list(records)).decode()
        write_atomically(self._path(turn, who), text)

    @property
    def times(self) -> list[datetime]:
        """When each kept run ended, in order."""
        return sorted(datetime.fromtimestamp(p.stat().st_mtime, UTC) for p in self._runs())

    def remove(self) -> None:
        """Forget the runs."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _runs(self) -> list[Path]:
        return list(self.folder.glob("[0-9]*-*.json"))

    def _path(self, turn: int, who: Contender) -> Path:
        return self.folder / f"{turn}-{_digest(f'{who.group} {who.name} {who.version}')}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
