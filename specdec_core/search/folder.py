"""A sweep's folder: finished work is on disk, so that a killed sweep resumes.

    plan.yaml         the plan as the user wrote it, and its digest
    pair.json         the pair with the data types that every process uses
    weights.json      the digest of each model, head and saved state
    machine.json      the processors and the torch that times are taken with
    profile.json      what forwards cost
    trials/<id>.json  a finished configuration; its rounds are in <id>.parquet, unless it was
                      replayed: a replay yields them at any time
    optuna.db         what Optuna has learned
    timed.json        the result without the choice for a workload's loads, while that is made
    live/*.json       requests of a run under load: <load>-<turn>-<configuration>; together/ has
                      the runs of the configuration for all loads
    simulated.csv     every configuration simulated at every load
    sweep.json        the result
    rounds.parquet    rounds; of replayed configurations only the best
    finished          written last, after everything that reads the result

Every file is written whole, and a trial's JSON after its rounds: a configuration with a JSON file
is finished and is not submitted again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

import pandas as pd
import yaml
from pydantic import BaseModel

from specdec_core.base.errors import UserError
from specdec_core.base.files import atomic_path, locked, write_atomically
from specdec_core.base.names import check_name
from specdec_core.config import PairSpec, Stored, load_yaml, parse_json
from specdec_core.cost import Profile
from specdec_core.search.results import SweepResult, Trial

Kind = TypeVar("Kind", bound=BaseModel)
Result = TypeVar("Result", bound=Stored)


@dataclass(frozen=True)
class SweepFolder:
    path: Path

    @classmethod
    def claim(cls, root: Path, name: str, digest: str, fresh: bool = False) -> Self:
        """The folder to sweep in: the unfinished one of this digest, unless `fresh`, or else the
        first free one of `<name>`, `<name>-2`, `<name>-3`, …

        Raises :class:`UserError` when the unfinished sweep of that name has another digest, or the
        name is a path.
        """
        check_name(name)
        folders = (cls(root / (name if n == 1 else f"{name}-{n}")) for n in count(1))
        folder = next(f for f in folders if not (f.finished or (fresh and f.path.exists())))
        if folder.digest not in (None, digest):
            raise UserError(
                f"{folder.path} holds an unfinished sweep with other settings or prompts; "
                "give --fresh to start beside it, or another --name"
            )
        return folder

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def finished(self) -> bool:
        return (self.path / "finished").exists()

    @property
    def digest(self) -> str | None:
        plan = self.path / "plan.yaml"
        return load_yaml(plan).get("digest") if plan.exists() else None

    def begin(self, plan: Mapping[str, Any], digest: str) -> None:
        """Write the plan, as JSON, and its digest."""
        content = {"digest": digest, **plan}
        write_atomically(self.path / "plan.yaml", yaml.safe_dump(content, sort_keys=False))

    def keep_weights(self, weights: Mapping[str, str]) -> None:
        """Write what the results are of: a digest of each model, head and saved state by
        name. Raises :class:`UserError` where the sweep began with different weights."""
        self.check_weights(weights)
        if self.weights() is None:
            write_atomically(self.path / "weights.json", json.dumps(dict(weights), indent=1))

    def check_weights(self, weights: Mapping[str, str] | None) -> None:
        """Raises :class:`UserError` where the results were begun with other weights than these.
        Where either are unknown, nothing is compared."""
        kept = self.weights()
        if kept is None or weights is None:
            return
        if other := [name for name in {**kept, **weights} if kept.get(name) != weights.get(name)]:
            raise UserError(
                f"{self.path} was begun with other weights of {', '.join(other)}; give --fresh to"
                " start beside it"
            )

    def weights(self) -> dict[str, str] | None:
        """What :meth:`keep_weights` wrote; None where nothing is."""
        path = self.path / "weights.json"
        return json.loads(path.read_text()) if path.exists() else None

    def keep_machine(self, machine: Mapping[str, str]) -> None:
        """Write what times are taken with, as :func:`specdec_core.base.environment.machine` says
        it. Raises :class:`UserError` where the sweep began on another kind of machine: what it kept
        depends on that one's times."""
        path = self.path / "machine.json"
        if not path.exists():
            write_atomically(path, json.dumps(dict(machine), indent=1))
            return
        begun = json.loads(path.read_text())
        facts = [(n, begun.get(n, "none"), machine.get(n, "none")) for n in {**begun, **machine}]
        if other := [f"{name} {was}, not {now}" for name, was, now in facts if was != now]:
            raise UserError(
                f"{self.path} has times of another machine ({', '.join(other)}); resume it there,"
                " or give --fresh to start beside it"
            )

    def finish(self) -> None:
        write_atomically(self.path / "finished", "")

    def lock(self) -> AbstractContextManager[None]:
        """Keep a second driver out; the lock ends with the process, however that ends."""
        return locked(self.path, "sweep")

    # Finished work

    def result(self, kind: type[Result]) -> Result | None:
        """The result of the kind of sweep that the folder is of; None where there is none."""
        return self._read(kind.FILE, kind)

    def timed(self) -> SweepResult | None:
        """The result of a sweep that was interrupted while it chose for loads."""
        return self._read("timed.json", SweepResult)

    def save_timed(self, result: SweepResult) -> None:
        write_atomically(self.path / "timed.json", result.model_dump_json(indent=1))

    def pair(self) -> PairSpec | None:
        return self._read("pair.json", PairSpec)

    def save_pair(self, pair: PairSpec) -> None:
        write_atomically(self.path / "pair.json", pair.model_dump_json(indent=1))

    def profile(self) -> Profile | None:
        path = self.path / "profile.json"
        return Profile.load(path) if path.exists() else None

    def save_profile(self, profile: Profile) -> None:
        profile.save(self.path / "profile.json")

    def _read(self, name: str, kind: type[Kind]) -> Kind | None:
        path = self.path / name
        return _parsed(path, kind) if path.exists() else None

    def trials(self) -> list[Trial]:
        """Finished trials, including those that a scheduler stopped early, oldest first."""
        files = sorted((self.path / "trials").glob("*.json"), key=lambda f: f.stat().st_mtime_ns)
        return [_parsed(file, Trial) for file in files]

    def add_trial(self, trial: Trial, rounds: bytes | None) -> None:
        """Keep a finished trial, and its rounds as a Parquet file."""
        if rounds is not None:
            with atomic_path(self.path / "trials" / f"{trial.id}.parquet") as path:
                path.write_bytes(rounds)
        write_atomically(self.path / "trials" / f"{trial.id}.json", trial.model_dump_json(indent=1))

    def rounds(self, config_id: str) -> pd.DataFrame:
        """The rounds of a finished trial that was decoded."""
        return pd.read_parquet(self.path / "trials" / f"{config_id}.parquet")

    def save_rounds(self, more: Sequence[pd.DataFrame]) -> None:
        """Write the trials' rounds and `more`, in one table with a column config_id."""
        files = [self.path / "trials" / f"{trial.id}.parquet" for trial in self.trials()]
        parts = [pd.read_parquet(file) for file in files if file.exists()]
        if not (parts or more):  # nothing drafted
            return
        rounds = pd.concat([*parts, *more], ignore_index=True)
        with atomic_path(self.path / "rounds.parquet") as path:
            rounds.to_parquet(path, index=False)


def find_trial(root: Path, config_id: str) -> tuple[SweepResult, Trial]:
    """The trial with an id that begins with `config_id`, in the latest sweep under `root` that has
    it. Sweeps that this version cannot read are skipped. Raises :class:`UserError` when there is
    none."""
    for file in sorted(root.glob("*/sweep.json"), key=lambda f: f.stat().st_mtime, reverse=True):
        try:
            result = SweepResult.load(file.parent)
        except UserError:
            continue
        matches = [trial for trial in result.trials if trial.id.startswith(config_id)]
        if len(matches) > 1:
            raise UserError(f"{config_id}: fits {len(matches)} configurations of {result.name}")
        if matches:
            return result, matches[0]
    raise UserError(f"no configuration {config_id} in the sweeps of {root}")


def _parsed(path: Path, kind: type[Kind]) -> Kind:
    """A file of a sweep. Raises :class:`UserError` for one that this version does not read."""
    return parse_json(kind, path.read_bytes(), f"{path}: of another version (--fresh begins anew)")
