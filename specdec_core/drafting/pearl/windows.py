"""Length policies in asynchronous drafting.

A length policy works in rounds: a limit, one candidate after the other, a verdict. An asynchronous
draft has no rounds. So its chain is divided into windows, and each window is a round to the policy.
A window begins with the first candidate that the sequence does not have yet, and grows until the
policy stops it. Its accepted candidates are those that the sequence repeats, whichever round of the
target wrote it. Its verdict comes when the sequence has repeated all of them or has departed from
them. In greedy and coupled decoding this is the target's verdict on each candidate. With rejection
sampling a candidate that came too late to be verified counts as accepted only if the target drew
the same token.

The policy sees the candidates after a stopped window once that window has its verdict. So it knows
the outcome of one window when it decides about the next, as in synchronous drafting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdec_core.drafting.pearl.messages import Pause
from specdec_core.drafting.pearl.tree import Node, Source
from specdec_core.drafting.policies.policy import LengthPolicy, PolicyOutcome
from specdec_core.drafting.policies.signals import Signals


@dataclass(slots=True)
class _Window:
    last: Node  # its last candidate; the token before the first one while it is empty
    source: Source | None = None  # what the last candidate was drawn from
    limit: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_calls: int = 0
    stopped: bool = False

    def take(self, slot: int) -> Signals:
        """Add the chain's next token to this window; returns its signals."""
        source, drawn = self.last.source, self.last.drawn
        assert source is not None
        assert drawn is not None
        self.draft_calls += self.source is None or self.source.forward != source.forward
        self.drafted += 1
        self.source, self.last = source, drawn
        probs, hidden = (None if state is None else state[None] for state in source[2:])
        logits = source.logits[None]
        return Signals([slot], [drawn.token], [self.drafted], logits, probs, hidden)


class Windows:
    """The current window of each slot. `final` tokens end a sequence. `send` takes the pauses."""

    def __init__(
        self, policy: LengthPolicy, final: frozenset[int], send: Callable[[Pause], None]
    ) -> None:
        self._policy, self._final, self._send = policy, final, send
        self._windows: dict[int, _Window] = {}

    def begin(self, slot: int, root: Node) -> None:
        """A slot has a new sequence, which ends in `root`."""
        self._policy.reset(slot)
        self._windows[slot] = _Window(root)

    def confirm(self, slot: int, root: Node, agreed: int, departed: bool) -> None:
        """The sequence, now up to `root`, has repeated `agreed` more of the chain's tokens, and has
        then `departed` from the chain or not."""
        window = self._windows[slot]
        window.accepted = min(window.accepted + agreed, window.drafted)
        if not departed and window.accepted < window.drafted:
            return
        if window.drafted:
            outcome = PolicyOutcome(window.drafted, window.accepted, window.draft_calls)
            self._policy.observe(slot, outcome)
        self._windows[slot] = _Window(root)

    def end(self, slot: int) -> None:
        """The slot's request is over."""
        del self._windows[slot]

    def grow(self) -> None:
        """Show the policy the new tokens of the chains. Sends a pause where it stops."""
        policy = self._policy
        for slot, window in self._windows.items():
            while window.last.drawn is not None and not window.stopped:
                if not window.drafted:
                    window.limit = policy.limit(slot)
                signals = window.take(slot)
                ends = window.drafted >= window.limit or window.last.token in self._final
                goes_on = (policy.learns or not ends) and policy.go_on(signals)[0]
                window.stopped = ends or not goes_on
                if window.stopped:
                    self._send(Pause(slot, window.last.number))
