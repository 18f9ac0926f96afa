"""Rounds of recorded prompts, replayed or decoded: as arrays, one entry a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pandas as pd

from specdec_core.tokens.statistics import Counts, Round

NO_ARM = -1


@dataclass(frozen=True)
class ReplayedRounds:
    """The rounds of all prompts, in order: arrays with one entry a round (see
    :class:`specdec_core.tokens.statistics.Round`)."""

    prompt: np.ndarray  # number among the recorded prompts
    position: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    generated: np.ndarray
    draft_forwards: np.ndarray
    depth: np.ndarray
    draft_tokens: np.ndarray
    arm: np.ndarray  # NO_ARM where no bandit chose
    ids: list[str]  # of the prompts
    state: dict[str, Any] | None = None  # what the drafter has learned

    @classmethod
    def of_frame(cls, frame: pd.DataFrame, ids: list[str]) -> ReplayedRounds:
        """The rounds of prompts that were decoded, in the order of their `ids`, from what
        :func:`specdec_core.tokens.statistics.rounds_frame` made of them. Raises ValueError where
        these are not as many prompts."""
        prompt = (frame["round"] == 0).to_numpy().cumsum() - 1
        if (decoded := int(prompt.max(initial=-1)) + 1) != len(ids):
            raise ValueError(f"rounds of {decoded} prompts, not of {len(ids)}")
        columns: dict[str, Any] = {name: frame[name].to_numpy(np.int64) for name in _COUNTED}
        arm = pd.to_numeric(frame["arm"]).fillna(NO_ARM).to_numpy(np.int64)
        return cls(prompt=prompt, arm=arm, ids=ids, **columns)

    @classmethod
    def of_rows(
        cls, rows: Sequence[tuple[int, ...]], ids: list[str], state: dict[str, Any] | None
    ) -> ReplayedRounds:
        """Rounds with the values of the arrays, in their order."""
        names = [f.name for f in fields(cls)][:-2]
        columns = np.array(rows, dtype=np.int64).reshape(-1, len(names)).T
        return cls(**dict(zip(names, columns, strict=True)), ids=ids, state=state)

    @property
    def counts(self) -> Counts:
        drafted, accepted = int(self.drafted.sum()), int(self.accepted.sum())
        return Counts(
            requests=len(self.ids),
            n=int(self.generated.sum()),
            n_draft=int(self.draft_forwards.sum()),
            n_target=len(self.prompt),
            n_discarded=drafted - accepted,
            n_drafted=drafted,
            n_accepted=accepted,
            n_target_tokens=int((self.generated > self.accepted).sum()),
            n_draft_tokens=int(self.draft_tokens.sum()),
            n_draft_kept=int(np.minimum(self.draft_forwards, self.accepted).sum()),
        )

    def by_arm(self) -> dict[int | None, ReplayedRounds]:
        """The rounds that each of a bandit's arms proposed for; None: those without one."""
        arms = np.unique(self.arm).tolist()
        return {None if a == NO_ARM else a: self._where(self.arm == a) for a in arms}

    def by_width(self) -> list[ReplayedRounds]:
        """The rounds of every number of candidates that the target verified."""
        return [self._where(self.drafted == drafted) for drafted in np.unique(self.drafted)]

    def _where(self, chosen: np.ndarray) -> ReplayedRounds:
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        arrays = {name: c[chosen] for name, c in columns.items() if isinstance(c, np.ndarray)}
        return replace(self, **arrays)

    def frame(self, **columns: str) -> pd.DataFrame:
        """One row a round, as in :func:`specdec_core.tokens.statistics.rounds_frame`; all times
        are 0."""
        first = np.flatnonzero(self.position == 0)
        number = (
            np.arange(len(self.prompt))
            - first[np.searchsorted(first, range(len(self.prompt)), "right") - 1]
        )
        rows = {
            "request_id": np.asarray(self.ids, dtype=object)[self.prompt],
            "round": number,
            **{name: getattr(self, name) for name in _COUNTED},
            "arm": [None if arm == NO_ARM else arm for arm in self.arm.tolist()],
        }
        times = {f.name: 0.0 for f in fields(Round) if f.name.endswith("_seconds")}
        return pd.DataFrame({**rows, **times}).assign(**columns)


# The columns that rounds of decoding have, too.
_COUNTED = [
    f.name for f in fields(ReplayedRounds) if f.name not in ("prompt", "arm", "ids", "state")
]
