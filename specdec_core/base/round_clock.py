"""Where a round's time goes.

A runner counts its forwards' seconds, in `seconds`. Drafters report here the time of choosing
tokens and asking a length policy, and the engine the steps of the round. The rest of a round is
bookkeeping. Measuring takes a few microseconds a round, so it is always done.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class RoundClock:
    """Measures one round after the other. `policy` are the round's seconds of choosing drafted
    tokens and asking the policy; `waited` are its seconds of waiting for a draft model."""

    __slots__ = ("_began", "_drafted", "_fed", "_read", "_verified", "policy", "waited")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self.policy = self.waited = 0.0
        self._began = self._drafted = self._fed = self._read = self._verified = perf_counter()

    def chose(self, since: float, device: torch.device) -> None:
        """Tokens chosen on `device` are on the host; the forward returned at `since`. On a device
        that works asynchronously this time was mostly spent waiting for the forward, and counts as
        such."""
        seconds = perf_counter() - since
        if device.type == "cpu":
            self.policy += seconds
        else:
            self.waited += seconds

    def asked(self, since: float) -> None:
        """The policy, asked at `since`, has answered."""
        self.policy += perf_counter() - since

    def drafted(self) -> None:
        """Drafting is done."""
        self._drafted = perf_counter()

    def feeds(self) -> None:
        """The target begins to read the candidates."""
        self._fed = perf_counter()

    def read(self) -> None:
        """The target has read the candidates."""
        self._read = perf_counter()

    def verified(self) -> None:
        """Verification is done."""
        self._verified = perf_counter()

    @property
    def until_read(self) -> float:
        """Seconds of drafting and of the target's forward."""
        return self._read - self._began

    def seconds(self, draft_forwards: float) -> dict[str, float]:
        """The seconds of the finished round, by the names of the fields of
        :class:`specdec_core.tokens.statistics.Round`; the forwards of the draft models took
        `draft_forwards` seconds."""
        return {
            "draft_seconds": self._drafted - self._began,
            "target_seconds": self._read - self._drafted,
            "other_seconds": perf_counter() - self._read,
            "draft_forward_seconds": draft_forwards + self.waited,
            "policy_seconds": self.policy,
            "target_forward_seconds": self._read - self._fed,
            "verify_seconds": self._verified - self._read,
        }
