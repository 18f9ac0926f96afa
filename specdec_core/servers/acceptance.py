"""What other draft lengths would give a server, by its own metrics, without weights or sequences.

The number of candidates that were accepted at the first k positions is what a shorter chain would
have had, if acceptance at a position does not depend on where rounds begin. For longer chains the
estimate continues with the rate of the last position.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from specdec_core.base.files import write_atomically
from specdec_core.config import Value
from specdec_core.cost import Profile, draft_key
from specdec_core.cost.fitting import nonnegative_line


class Production(Value):
    """The steps of all requests of a server, summed up. `proposed` of the `steps` had candidates,
    at most `length` each and `candidates` in total; `accepted` are the accepted ones by position.
    `seconds` is the mean time of a step of a request, with prefills of other requests.

    Where the length varied and the server tells it, `reached` are, by position, the steps with a
    candidate there and with all candidates before it accepted."""

    length: int
    steps: int
    proposed: int
    candidates: int
    accepted: tuple[int, ...]
    seconds: float
    reached: tuple[int, ...] = ()

    @property
    def varied(self) -> bool:
        """Whether some steps had fewer candidates than other steps: the server's length varied, or
        its drafter found fewer."""
        return self.candidates < self.proposed * self.length

    @property
    def surviving(self) -> np.ndarray:
        """The share of steps that accepts a first, a second, … candidate: as counted, or, by
        `reached`, if all steps with candidates had the full length."""
        if not self.reached:
            return np.array(self.accepted) / max(self.steps, 1)
        rates = np.array(self.accepted) / np.maximum(self.reached, 1)
        return np.cumprod(rates) * self.proposed / max(self.steps, 1)

    def tokens(self, length: int) -> float:
        """Expected tokens of a step that proposes up to `length` candidates."""
        surviving = self.surviving
        known = float(surviving[:length].sum())
        if length <= len(surviving) or not len(surviving):
            return 1 + known
        before = surviving[-2] if len(surviving) > 1 else self.proposed / max(self.steps, 1)
        rate = min(float(surviving[-1] / before), 1.0) if before else 0.0
        beyond = surviving[-1] * sum(rate**n for n in range(1, length - len(surviving) + 1))
        return 1 + known + float(beyond)


class Expectation(Value):
    """The estimate for a length: the tokens of a step, its seconds where they are known, and
    whether the length lies beyond those that the server used."""

    length: int
    tokens: float
    seconds: float | None
    beyond: bool

    @property
    def speed(self) -> float | None:
        """Tokens a second of a request."""
        return self.tokens / self.seconds if self.seconds else None


def expectations(
    seen: Sequence[Production],
    lengths: Iterable[int],
    profile: Profile | None = None,
    draft: str | None = None,
) -> list[Expectation]:
    """What `lengths` are expected to give, and the lengths of the servers that were `seen`.

    The seconds of a step at another length come from a line through several servers' lengths; else
    from their change with the length in a `profile` of such a server with `draft`; else they are
    not known. The acceptance is that of the server with the longest length.
    """
    longest = max(seen, key=lambda each: each.length)
    own = {each.length: each.seconds for each in seen}
    line = nonnegative_line([*own], [*own.values()]) if len(own) > 1 else None
    found = []
    for length in sorted({*lengths, *own}):
        seconds = own.get(length)
        if seconds is None and line is not None:
            seconds = line[0] + line[1] * length
        elif seconds is None and profile is not None:
            whole = (_step(profile, draft, n) for n in (length, longest.length))
            seconds = longest.seconds * next(whole) / next(whole)
        found.append(
            Expectation(
                length=length,
                tokens=longest.tokens(length),
                seconds=seconds,
                beyond=length > longest.length,
            )
        )
    return found


def save(seen: Sequence[Production], path: Path) -> Path:
    return write_atomically(path, json.dumps([s.model_dump(mode="json") for s in seen], indent=1))


def _step(profile: Profile, draft: str | None, length: int) -> float:
    """Seconds of a step by a profile, with a chain of `draft` or, for None, of a lookup."""
    seconds = profile.t_target(1 + length) + profile.round_overhead
    if draft is None:
        return seconds
    return seconds + length * profile.t_draft(draft) + profile.proposals.get(draft_key(draft), 0.0)
