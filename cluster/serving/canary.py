"""A challenger gets a share of the traffic until it is shown to be faster, or not to be.

Both write the same text, or texts of the same distribution, so only speed is compared. Requests go
to one of the two at a time, in turns, so that both meet the load as it is: were they mixed, the one
with the smaller share would decode smaller batches. A turn counts the requests that ran while the
other engine was idle. A turn of the challenger's and the champion's after it are a pair, and the
intervals over pairs hold at every pair at once (:mod:`specdec_core.search.race`), so the first that
allows a decision makes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, isfinite
from typing import Literal, NamedTuple

from cluster.serving.protocol.models import CanaryState
from cluster.serving.served import Served
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.search.race import Race
from specdec_core.tokens.statistics import Generation

COUNTED = 4  # requests that end a turn
MOST = 10 * COUNTED  # requests in a turn of the challenger's, whether they count or not
CONFIDENCE = 0.95  # of the decision
PAIRS = 200  # after so many a challenger that is not shown to be faster is dropped

Side = Literal["champion", "challenger"]


class _Turn(NamedTuple):
    """Whose turn it is, and what it has counted."""

    side: Side
    number: int
    submitted: int = 0
    counted: int = 0
    seconds: float = 0.0
    tokens: int = 0


class Canary:
    """Which of two engines takes a request, and how they compare. `share` of the requests go to the
    challenger."""

    def __init__(
        self, champion: Served, challenger: Served, share: float, confidence: float = CONFIDENCE
    ) -> None:
        self.sides: dict[Side, Served] = {"champion": champion, "challenger": challenger}
        self.share = share
        self.state: Literal["running", "promoted", "dropped"] = "running"
        self.reason = ""
        self._race: Race[Side] = Race(tuple(self.sides), confidence=confidence)
        self._turn = _Turn("challenger", 0)
        self._before: _Turn | None = None  # the challenger's of this pair
        self._clean: dict[str, int] = {}  # requests that began beside an idle engine: their turn

    def choose(self, request_ids: list[str]) -> Served:
        """Who takes these requests."""
        turn = self._turn = self._next(self._turn)
        self._turn = turn._replace(submitted=turn.submitted + len(request_ids))
        if not self._other(turn.side).loop.running:
            self._clean |= dict.fromkeys(request_ids, turn.number)
        return self.sides[turn.side]

    def finished(self, request_id: str, generation: Generation) -> None:
        """A request has ended. Decides where that allows it."""
        turn = self._turn
        if self._clean.pop(request_id, None) != turn.number or self._other(turn.side).loop.running:
            return
        if not generation.tokens:  # only its prompt was read
            return
        self._turn = turn._replace(
            counted=turn.counted + 1,
            seconds=turn.seconds + generation.seconds,
            tokens=turn.tokens + len(generation.tokens),
        )

    def left(self, request_id: str) -> None:
        """A request was given up."""
        self._clean.pop(request_id, None)

    def end(self, state: Literal["promoted", "dropped"], reason: str) -> None:
        """It is over."""
        self.state, self.reason = state, reason

    def said(self) -> CanaryState:
        """How it stands."""
        ratio = self._race.ratio("challenger", "champion")
        known = self._race.prompts > 0
        configuration = self.sides["challenger"].deployment.configuration
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
            if turn.counted < COUNTED and turn.submitted < MOST:
                return turn
            self._before = turn
            return _Turn("champion", turn.number + 1)
        assert self._before is not None
        wanted = ceil(self._before.submitted * (1 - self.share) / self.share)
        if turn.submitted < wanted or (turn.counted < COUNTED and turn.submitted < wanted + MOST):
            return turn
        self._pair(self._before, turn)
        return _Turn("challenger", turn.number + 1)

    def _pair(self, challenger: _Turn, champion: _Turn) -> None:
        """Compare two turns, and decide if that is enough."""
        if not (challenger.counted and champion.counted):
            return
        pair = challenger.number
        self._race.add("champion", pair, champion.seconds, champion.tokens)
        # Turns are of unequal size: what is compared is seconds a token.
        as_many = challenger.seconds * champion.tokens / challenger.tokens
        self._race.add("challenger", pair, as_many, champion.tokens)
        ratio = self._race.ratio("challenger", "champion")
        if ratio.low > 1:
            self.end("promoted", f"it is faster, {ratio.value:.2f}×")
        elif ratio.high < 1:
            self.end("dropped", f"it is slower, {ratio.value:.2f}×")
        elif self._race.prompts >= PAIRS:
            self.end("dropped", f"it was not shown to be faster in {PAIRS} pairs of turns")

    def _other(self, side: Side) -> Served:
        return self.sides["champion" if side == "challenger" else "challenger"]


def check_comparable(configurations: Iterable[Configuration], share: float) -> None:
    """Raises :class:`UserError` where more than speed would have to be compared."""
    if not 0 < share < 1:
        raise UserError(f"canary: {share:g} of the traffic; expected more than 0 and less than 1")
    for configuration in configurations:
        if not configuration.lossless:
            raise UserError(
                f"{configuration.label} is lossy: texts would differ, and not only speed"
            )
