"""A benchmark's result, and what follows from it: ratios, equal outputs, the best, where the
time went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from pydantic import Field

from specdec_core.config import Document
from specdec_core.measure.comparison import EVERYTHING, OURS, Comparison, Contender, Requests

PARTS_OF_A_ROUND = {  # as :class:`specdec_core.tokens.statistics.Round` names them, and titles
    "target_forward": "target forwards",
    "draft_forward": "draft forwards",
    "policy": "policy",
    "verify": "verification",
    "bookkeeping": "bookkeeping",
}
PARTS = {**PARTS_OF_A_ROUND, "prefill": "prefill", "outside": "outside rounds"}  # of a token's time


class Take(Document):
    """One contestant decodes one prompt, once: seconds and tokens of each turn of the prompt.
    `steps` are the tokens that each target forward of each turn added, and `parts` the seconds of
    the prefill and of each of :data:`PARTS_OF_A_ROUND`, where known."""

    seconds: list[float]
    outputs: list[list[int]]
    steps: list[list[int]] | None = None
    parts: dict[str, float] | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def accepted(self) -> list[int]:
        """All turns' steps; empty where unknown."""
        return [n for turn in self.steps or () for n in turn]

    @property
    def written(self) -> list[int]:
        """All turns' tokens, one after the other."""
        return [token for output in self.outputs for token in output]


class Agreement(Document):
    """How many of `compared` greedy outputs equal a reference's, and the first token (from 0) at
    which any other output differs; None where none does."""

    compared: int
    equal: int
    first: int | None = None

    @property
    def complete(self) -> bool:
        return self.equal == self.compared


class BenchRow(Contender):
    """A contestant at one temperature, and its takes [repeat][prompt]."""

    temperature: float
    takes: list[list[Take]] = Field(default=[])

    def paces(self, at: Any = None) -> np.ndarray:
        """Prefill included."""
        return np.array(
            [[sum(t.seconds) / max(t.tokens, 1) for t in repeat] for repeat in self.takes]
        )

    @property
    def tokens(self) -> int:
        """Of all takes."""
        return max(sum(take.tokens for repeat in self.takes for take in repeat), 1)

    @property
    def seconds(self) -> float:
        """Of all takes."""
        return sum(sum(take.seconds) for repeat in self.takes for take in repeat)

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.mean_seconds()

    def agreement(self, reference: BenchRow) -> Agreement:
        """With the first repeat of `reference`, over every repeat."""
        expected = [take.written for take in reference.takes[0]]
        differences = [
            first_difference(take.written, output)
            for repeat in self.takes
            for take, output in zip(repeat, expected, strict=True)
        ]
        positions = [position for position in differences if position is not None]
        return Agreement(
            compared=len(differences),
            equal=len(differences) - len(positions),
            first=min(positions, default=None),
        )

    def seconds_by_part(self) -> dict[str, float]:
        """Seconds of an output token by each of :data:`PARTS`; together they are the token's whole
        time. `outside` rounds, requests are opened and closed, and tokens become text. Empty for a
        row of another library."""
        known = [take.parts for repeat in self.takes for take in repeat if take.parts is not None]
        if not known:
            return {}
        parts = {name: sum(of[name] for of in known) / self.tokens for name in known[0]}
        return {**parts, "outside": self.seconds / self.tokens - sum(parts.values())}

    def mean_accepted(self) -> float | None:
        """Tokens a target forward, over all repeats; None where unknown."""
        steps = [n for repeat in self.takes for take in repeat for n in take.accepted]
        return float(np.mean(steps)) if steps else None


class BenchResult(Comparison[BenchRow]):
    """A benchmark of one request at a time."""

    FILE: ClassVar[str] = "bench.json"
    WHAT: ClassVar[str] = "benchmark"

    ids: list[str]  # [prompt]
    categories: list[str | None]  # [prompt]

    @property
    def temperatures(self) -> list[float]:
        return list(dict.fromkeys(row.temperature for row in self.rows))

    def at(self, temperature: float, group: str | None = None) -> list[BenchRow]:
        """The rows of a temperature, of one group or all."""
        rows = [row for row in self.rows if row.temperature == temperature]
        return [row for row in rows if group in (None, row.group)]

    def autoregressive(self, temperature: float, group: str = OURS) -> BenchRow | None:
        """The baseline of a group: its rows must write the same."""
        return next((row for row in self.at(temperature, group) if row.autoregressive), None)

    def sizes(self) -> list[tuple[float, int]]:
        return [(temperature, len(self.ids)) for temperature in self.temperatures]

    def best(self, at: float, group: str, requests: Requests = EVERYTHING) -> BenchRow | None:
        """The fastest lossless row of a group at a temperature."""
        own = [row for row in self.at(at, group) if row.lossless and not row.with_ours]
        return min(own, key=lambda row: row.mean_seconds(at, requests), default=None)

    def unequal(self) -> list[BenchRow]:
        """Our lossless rows with greedy outputs in float32 unequal to autoregressive decoding's."""
        baseline = self.autoregressive(0.0)
        if self.pair.runner.target_dtype != "float32" or baseline is None:
            return []
        lossless = [row for row in self.at(0.0, OURS) if row.lossless]
        return [row for row in lossless if not row.agreement(baseline).complete]


def first_difference(output: Sequence[int], expected: Sequence[int]) -> int | None:
    """The first position at which they differ, or the end of the shorter; None if equal."""
    if output == expected:
        return None
    pairs = zip(output, expected, strict=False)
    unlike = (place for place, (a, b) in enumerate(pairs) if a != b)
    return next(unlike, min(len(output), len(expected)))


def summary_frame(result: BenchResult) -> pd.DataFrame:
    """One row a contestant and temperature: tokens/s, the ratios with their intervals to our
    autoregressive decoding and to the best of every other group, and equal outputs."""
    rows = []
    for row in result.rows:
        at = row.temperature
        summary: dict[str, Any] = {
            "contestant": row.name,
            "group": row.group,
            "version": row.version,
            "temperature": at,
            "lossless": row.lossless,
            "tokens_per_second": row.tokens_per_second,
            "mean_accepted": row.mean_accepted(),
            **result.ratios(row, at, result.autoregressive(at)),
        }
        for name, group in (("own", row.group), ("ours", OURS)):
            reference = result.autoregressive(at, group)
            agreement = row.agreement(reference) if reference is not None and at == 0 else None
            summary |= {
                f"equal_{name}": agreement.equal if agreement else None,
                f"compared_{name}": agreement.compared if agreement else None,
                f"first_difference_{name}": agreement.first if agreement else None,
            }
        rows.append(summary)
    return pd.DataFrame(rows)


def parts_frame(result: BenchResult, temperature: float) -> pd.DataFrame:
    """One row for each of our rows at a temperature, the fastest first: milliseconds of a token,
    and by each of :data:`PARTS` (`<part>_ms`)."""
    rows = []
    for row in result.at(temperature, OURS):
        if parts := row.seconds_by_part():
            milliseconds = {f"{name}_ms": 1e3 * parts[name] for name in PARTS}
            place = {"contestant": row.name, "temperature": temperature}
            rows.append({**place, "ms_per_token": sum(milliseconds.values()), **milliseconds})
    frame = pd.DataFrame(rows)
    return frame.sort_values("ms_per_token").reset_index(drop=True) if rows else frame
