"""Live runs of configurations at a load, kept as they are taken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pandas as pd

from specdec_core.base.files import atomic_path
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration
from specdec_core.search.load.workload import Load

Key = tuple[str, int, str]  # load, turn, configuration


class LoadTimer(Protocol):
    """Answers the requests of a load on the live engine, alone on its devices."""

    def warm_up(self, configuration: Configuration, load: Load) -> None:
        """Answer some requests, untimed: steps of a new shape compile their kernels."""

    def answer(self, configuration: Configuration, load: Load) -> pd.DataFrame:
        """Records of the requests, as in :mod:`specdec_core.search.load.measures`. Drafters begin
        with nothing learned."""


class LiveRuns:
    """The records of runs, by load, turn and configuration. With a folder each is a file there as
    soon as it is taken, and those that are there already are not taken again."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._records: dict[Key, pd.DataFrame] = {}
        self._warm: set[tuple[str, str]] = set()  # load, configuration

    def has(self, load: Load, turn: int, configuration: Configuration) -> bool:
        """Whether this run was taken."""
        key = load.label, turn, configuration.id
        path = self._path(load, turn, configuration)
        if key not in self._records and path is not None and path.exists():
            self._records[key] = pd.read_parquet(path)
        return key in self._records

    def records(self, load: Load, turn: int, configuration: Configuration) -> pd.DataFrame:
        """What a run that was taken recorded."""
        return self._records[load.label, turn, configuration.id]

    def add(
        self, load: Load, turn: int, configuration: Configuration, records: pd.DataFrame
    ) -> None:
        self._records[load.label, turn, configuration.id] = records
        if path := self._path(load, turn, configuration):
            with atomic_path(path) as temporary:
                records.to_parquet(temporary, index=False)

    def take_turn(
        self,
        load: Load,
        configurations: Sequence[Configuration],
        turn: int,
        timer: LoadTimer,
        observer: Observer,
    ) -> None:
        """Take a run of everyone that is missing. Each turn begins with another one, so that none
        always runs after the same."""
        shift = turn % len(configurations)
        for configuration in [*configurations[shift:], *configurations[:shift]]:
            if not self.has(load, turn, configuration):
                if (key := (load.label, configuration.id)) not in self._warm:
                    timer.warm_up(configuration, load)
                    self._warm.add(key)
                self.add(load, turn, configuration, timer.answer(configuration, load))
            observer.step()

    def _path(self, load: Load, turn: int, configuration: Configuration) -> Path | None:
        if self.folder is None:
            return None
        name = f"{load.clients or 'open'}-{turn}-{configuration.id}"
        return self.folder / f"{name}.parquet"
