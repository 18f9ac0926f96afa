"""Where a round's time goes.

A runner counts its forwards' seconds, in `seconds`; a drafter that asks a policy counts here. What
is left of a round is bookkeeping. Taking the time costs a round a few microseconds, so it is always
taken.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class RoundClock:
    """Seconds since the round began of `policy`: choosing the drafted tokens and asking whether to
    draft another one; and `waited`, for a draft model's forwards."""

    __slots__ = ("policy", "waited")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self.policy = self.waited = 0.0

    def chose(self, since: float, logits: Tensor) -> None:
        """Tokens were chosen from `logits` and are known to the host; the forward that made those
        returned at `since`. On a device that works while the host goes on, this was above all the
        wait for the forward, and counts as such."""
        seconds = perf_counter() - since
        if logits.device.type == "cpu":
            self.policy += seconds
        else:
            self.waited += seconds

    def asked(self, since: float) -> None:
        """The policy was asked at `since` and has answered."""
        self.policy += perf_counter() - since
