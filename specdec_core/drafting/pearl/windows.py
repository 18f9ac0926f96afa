"""A length policy for a draft that drafts ahead.

A policy knows rounds: a limit, one candidate after the other, a verdict. A draft that drafts on has
no rounds. So its chain is divided into windows, and each window is a round to the policy. A window
begins with the first candidate that the text has not confirmed, and grows until the policy stops
it. Its verdict is the text: accepted are the candidates that the text repeats, whichever round of
the target wrote it. It comes when the text has repeated all of them, or goes on in another way.
Greedy and coupled, that is what the target would say of each candidate; with rejection sampling one
that came too late to be judged counts as accepted only if the target has drawn the same token.

What is drafted behind a stopped window waits for that window's verdict. So the policy knows what
became of one window when it decides about the next, as it does where draft and target take turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_core.drafting.pearl.canopy import Node, Source
from specdec_core.drafting.pearl.messages import Pause
from specdec_core.drafting.policies.policy import LengthPolicy, PolicyOutcome
from specdec_core.drafting.policies.signals import Signals


@dataclass(slots=True)
class _Window:
    last: Node  # of its candidates; of an empty one, what the first candidate will follow
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
    """The windows of all slots, one at a time of each. `final` tokens end a text."""

    def __init__(self, policy: LengthPolicy, final: frozenset[int]) -> None:
        self._policy, self._final = policy, final
        self._windows: dict[int, _Window] = {}

    def begin(self, slot: int, root: Node) -> None:
        """A slot's text is new; `root` is its last token."""
        self._policy.reset(slot)
        self._windows[slot] = _Window(root)

    def confirm(self, slot: int, root: Node, agreed: int, parted: bool) -> None:
        """The text, now up to `root`, goes on with so many of the chain's tokens; whether it has
        then `parted` from the chain."""
        window = self._windows[slot]
        window.accepted = min(window.accepted + agreed, window.drafted)
        if not parted and window.accepted < window.drafted:
            return
        if window.drafted:
            told = PolicyOutcome(window.drafted, window.accepted, window.draft_calls)
            self._policy.observe(slot, told)
        self._windows[slot] = _Window(root)

    def end(self, slot: int) -> None:
        """The slot's request is over."""
        del self._windows[slot]

    def grow(self) -> Iterator[Pause]:
        """Show the policy what the chains have grown by, one token of each slot at a time. Where it
        stops, there is a pause."""
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
                for window, going in answers:
                    window.stopped = window.stopped or not going
            yield from (Pause(s, w.last.number) for s, w in grown.items() if w.stopped)

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
