"""What is measured of a comparison, kept until it is whole.

    <folder>/comparison.json        what is compared; the folder's name is the digest of it
    <folder>/pair.json              the pair with the data types that every run uses
    <folder>/<turn>-<key>.json      the run of a contestant in a turn: its records or takes

Every file is written whole or not at all, so a run is there or was not made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from specdec_core.base.files import locked, write_atomically
from specdec_core.base.names import digest_name
from specdec_core.config import PairSpec, Value
from specdec_core.prompts.prompt_sets import PromptSet

Item = TypeVar("Item")


def described(
    name: str | None,
    plan: Value,
    weights: Mapping[str, str],
    prompts: PromptSet,
    exported: Sequence[Any],
    environment: Mapping[str, str],
    **more: Any,
) -> dict[str, Any]:
    """The identity of a comparison; an interrupted one is resumed by a run with the same: the
    `name` that was given, if any, the plan, the `weights` by their digests, the prompts, the
    settings of ours that other libraries get (`exported`), and the machine and code."""
    return {
        "name": name,
        "plan": plan.model_dump(mode="json"),
        "weights": dict(weights),
        "prompts": prompts.digest,
        "exported": list(exported),
        "environment": dict(environment),
        **more,
    }


@dataclass(frozen=True)
class Parts(Generic[Item]):
    """The runs of one comparison in a folder of their own, each a list of `kind`."""

    folder: Path
    kind: type[Item]

    @classmethod
    @contextmanager
    def open(
        cls, root: Path, what: Mapping[str, Any], kind: type[Item], fresh: bool = False
    ) -> Iterator[Parts[Item]]:
        """The runs of the comparison that `what` describes, all of it in JSON: those that an
        interrupted one left below `root`, unless `fresh`. Another description has other runs.
        Raises :class:`UserError` where another process measures the same."""
        text = json.dumps(what, sort_keys=True, indent=1)
        parts = cls(root / f".{digest_name(text)}", kind)
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
                    if not any(root.iterdir()):
                        root.rmdir()

    def pair(self, resolved: PairSpec) -> PairSpec:
        """The pair with the data types that the first run had; `resolved` where there was none.
        Automatic types are measured, so they may differ from run to run."""
        path = self.folder / "pair.json"
        if path.exists():
            return PairSpec.model_validate_json(path.read_bytes())
        write_atomically(path, resolved.model_dump_json(indent=1))
        return resolved

    def path(self, run: str) -> Path:
        """The file of a run, by the turn and the contestant's key."""
        return self.folder / f"{run}.json"

    def get(self, run: str) -> list[Item] | None:
        """A run that was kept; None of one that was not."""
        path = self.path(run)
        return self._content.validate_json(path.read_bytes()) if path.exists() else None

    def keep(self, run: str, items: Sequence[Item]) -> None:
        """Keep a run."""
        write_atomically(self.path(run), self._content.dump_json(list(items)).decode())

    @property
    def notes(self) -> list[str]:
        """The time of earlier runs, where there are any, before further ones are kept."""
        if not self.times:
            return []
        until = f"{self.times[-1]:%-d %B %Y, %H:%M} UTC"
        runs = f"of the runs, {len(self.times)} had been measured until {until}"
        return [f"interrupted and resumed: {runs}"]

    @property
    def times(self) -> list[datetime]:
        """When each kept run ended, in order."""
        runs = self.folder.glob("*-*.json")
        return sorted(datetime.fromtimestamp(run.stat().st_mtime, UTC) for run in runs)

    def remove(self) -> None:
        """Forget the runs."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _content(self) -> TypeAdapter[list[Item]]:
        return TypeAdapter(list[self.kind])  # type: ignore[name-defined]  # known here alone
