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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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

    def take(self) -> None:
        """The chain's next token is a candidate of this window."""
        source, drawn = self.last.source, self.last.drawn
        assert source is not None
        assert drawn is not None
        self.draft_calls += self.source is None or self.source.forward != source.forward
        self.drafted += 1
        self.source, self.last = source, drawn


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
        """Show the policy the new tokens of the chains, one of each slot at a time. Sends a pause
        where it stops."""
        policy = self._policy
        while grown := {s: w for s, w in self._windows.items() if w.last.drawn and not w.stopped}:
            for slot, window in grown.items():
                if not window.drafted:
                    window.limit = policy.limit(slot, len(self._windows))
                window.take()
                ends = window.drafted >= window.limit or window.last.token in self._final
                window.stopped = ends
            shown = {s: w for s, w in grown.items() if policy.learns or not w.stopped}
            if shown:
                answers = zip(shown.values(), policy.go_on(self._signals(shown)), strict=True)
                for window, goes_on in answers:
                    window.stopped = window.stopped or not goes_on
            for slot, window in grown.items():
                if window.stopped:
                    self._send(Pause(slot, window.last.number))

    def _signals(self, shown: Mapping[int, _Window]) -> Signals:
        windows = shown.values()
        sources = [window.source for window in windows if window.source is not None]
        hidden = [source.hidden for source in sources if source.hidden is not None]
        signals = Signals(
            list(shown),
            [window.last.token for window in windows],
            [window.drafted for window in windows],
            torch.stack([source.logits for source in sources]),
            _probs(sources),
            torch.stack(hidden) if len(hidden) == len(sources) else None,
        )
        signals.fetch(self._policy.reads)
        return signals


def _probs(sources: Sequence[Source]) -> Tensor | None:
    """The distributions (n, vocabulary), at temperature 1 where decoding is greedy; None where it
    is greedy everywhere."""
    if all(source.probs is None for source in sources):
        return None
    return torch.stack(
        [s.logits.float().softmax(dim=-1) if s.probs is None else s.probs for s in sources]
    )
