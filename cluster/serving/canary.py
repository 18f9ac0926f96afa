"""A challenger gets a share of the traffic until it is shown to be faster, or not to be.

Both write the same output, or output of the same distribution, so only speed is compared. Requests
go to one of the two sides at a time, so that both meet the real load: mixed, the side with the
smaller share would decode smaller batches. A turn counts the requests that
ran while the other side was idle. A turn of the challenger and the champion's turn after it are a
pair. The intervals over pairs hold at every pair at once (:mod:`specdec_core.search.race`), so the
first that allows a decision makes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Literal

from cluster.serving.protocol.models import CanaryState
from cluster.serving.served import Served
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.search.race import Race
from specdec_core.tokens.statistics import Generation

# For each replica:
COUNTED = 4  # counted requests that end a turn
MOST = 10 * COUNTED  # requests in a turn of the challenger, counted or not
CONFIDENCE = 0.95  # of the decision
PAIRS = 200  # after which a challenger that is not shown to be faster is dropped

Side = Literal["champion", "challenger"]


@dataclass
class _Turn:
    """A side's turn and its counts."""

    side: Side
    number: int
    submitted: int = 0
    counted: int = 0
    seconds: float = 0.0
    tokens: int = 0


class Canary:
    """Which of two sides takes a request, and how they compare. A side has the engine of each
    replica; `share` of the requests go to the challenger."""

    def __init__(
        self,
        champion: Sequence[Served],
        challenger: Sequence[Served],
        share: float,
    ) -> None:
        self.sides: dict[Side, Sequence[Served]] = {"champion": champion, "challenger": challenger}
        self.share = share
        self.state: Literal["running", "promoted", "dropped"] = "running"
        self.reason = ""
        self._counted, self._most = COUNTED * len(challenger), MOST * len(challenger)
        self._race = Race(tuple(self.sides), confidence=CONFIDENCE)
        self._turn = _Turn("challenger", 0)
        self._before: _Turn | None = None  # the challenger's turn of this pair
        self._clean: dict[str, int] = {}  # the turn of each request that began beside an idle side

    def choose(self, request_ids: list[str]) -> Side:
        """The side that takes these requests."""
        turn = self._turn = self._next(self._turn)
        turn.submitted += len(request_ids)
        if self._other_idle(turn.side):
            self._clean |= dict.fromkeys(request_ids, turn.number)
        return turn.side

    def ended(self, request_id: str, generation: Generation | None) -> None:
        """A request has ended, or, without a generation, was given up."""
        turn = self._turn
        clean = self._clean.pop(request_id, None) == turn.number and self._other_idle(turn.side)
        if not clean or generation is None or not generation.tokens:
            return
        turn.counted += 1
        turn.seconds += generation.seconds
        turn.tokens += len(generation.tokens)

    def end(self, state: Literal["promoted", "dropped"], reason: str) -> None:
        """End the canary."""
        self.state, self.reason = state, reason

    def status(self) -> CanaryState:
        """The comparison so far."""
        ratio = self._race.ratio("challenger", "champion")
        known = self._race.prompts > 0
        configuration = self.sides["challenger"][0].deployment.configuration
        return CanaryState(
            configuration=configuration.id,
            label=configuration.label,
            share=self.share,
            state=self.state,
            reason=self.reason,
            pairs=self._race.prompts,
            ratio=ratio.value if known else None,
            low=ratio.low if known else None,
            high=ratio.high if known and isfinite(ratio.high) else None,
        )

    def _next(self, turn: _Turn) -> _Turn:
        """The turn of the next request."""
        if turn.side == "challenger":
            if turn.counted < self._counted and turn.submitted < self._most:
                return turn
            self._before = turn
            return _Turn("champion", turn.number + 1)
        assert self._before is not None
        wanted = ceil(self._before.submitted * (1 - self.share) / self.share)
        if turn.submitted < wanted or (
            turn.counted < self._counted and turn.submitted < wanted + self._most
        ):
            return turn
        self._pair(self._before, turn)
        return _Turn("challenger", turn.number + 1)

    def _pair(self, challenger: _Turn, champion: _Turn) -> None:
        """Compare two turns, and decide if the pairs so far allow it."""
        if not (challenger.counted and champion.counted):
            return
        pair = challenger.number
        self._race.add("champion", pair, champion.seconds, champion.tokens)
        # Turns differ in size, so seconds a token are compared.
        as_many = challenger.seconds * champion.tokens / challenger.tokens
        self._race.add("challenger", pair, as_many, champion.tokens)
        ratio = self._race.ratio("challenger", "champion")
        if ratio.low > 1:
            self.end("promoted", f"it is faster, {ratio.value:.2f}×")
        elif ratio.high < 1:
            self.end("dropped", f"it is slower, {ratio.value:.2f}×")
        elif self._race.prompts >= PAIRS:
            self.end("dropped", f"it was not shown to be faster in {PAIRS} pairs of turns")

    def _other_idle(self, side: Side) -> bool:
        other = self.sides["champion" if side == "challenger" else "challenger"]
        return not any(served.running for served in other)


def check_comparable(configurations: Iterable[Configuration], share: float) -> None:
    """Raises :class:`UserError` where more than speed would have to be compared."""
    if not 0 < share < 1:
        raise UserError(f"canary: {share:g} of the traffic; expected more than 0 and less than 1")
    for configuration in configurations:
        if not configuration.lossless:
            raise UserError(
                f"{configuration.label} is lossy: texts would differ, and not only speed"
            )
