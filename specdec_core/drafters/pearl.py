"""Candidates from a draft that drafts on while the target verifies (PEARL, Liu et al., 2025).

The draft runs elsewhere (:mod:`specdec_core.pearl.ahead`) and sends what it drafts. A round feeds
the candidates that are there. What arrives while the target is busy is the next round's, if the
text turns out to be what the draft took it for (post-verification); and the first of it is judged
with this round's last distribution, where otherwise the target would add a token of its own. So a
round that feeds no candidate is PEARL's pre-verification. Everything is judged by the one rule of
verify.py: the output is the target's.

Without a draft, because it has died or has not come yet, rounds have no candidates: that is
autoregressive decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

from torch import Tensor

from specdec_core.config import PearlDrafter
from specdec_core.drafters.base import Drafter, Outcome, Resources, Sequencing
from specdec_core.pearl.messages import (
    Ask,
    Begin,
    Commit,
    Configure,
    Distribution,
    Drafted,
    End,
    Pause,
)
from specdec_core.pearl.pace import Pace
from specdec_core.pearl.timeline import Timeline
from specdec_core.stats import Origin
from specdec_core.token_tree import Elsewhere, TokenTree
from specdec_core.wire import LinkLost

# How many times longer than expected a draft may keep the target waiting.
_PATIENCE = 4.0
_LEAST_PATIENCE = 0.005  # seconds
# A draft that has died between drafting a rejected token and saying what from is waited for.
_RETURN = 600.0  # seconds

# Of corrections. No two have the same number, also of drafters that take turns on one link.
_SERIALS = count(1)


@dataclass(slots=True)
class _Stream:
    """What has come from the draft for a slot, and not been judged."""

    sequence: Sequencing
    end: int
    draft: int = 0  # the number of the draft that knows the slot's text
    serial: int = 0
    tokens: list[int] = field(default_factory=list)
    probabilities: list[float | None] = field(default_factory=list)
    # What a draft sends that has not heeded this correction belongs to another text.
    needs: int = 0
    own: dict[int, int] = field(default_factory=dict)  # corrections by the place of their token
    paused: bool = False
    outdated: bool = False  # the draft was told a text that a round has been judged behind since
    forwards: int = 0

    def clear(self) -> None:
        self.tokens, self.probabilities, self.own, self.paused = [], [], {}, False


class Pearl(Drafter):
    """Proposes what a draft elsewhere has drafted."""

    def __init__(self, settings: PearlDrafter, resources: Resources) -> None:
        self.settings, self.resources = settings, resources
        self.link = resources.open_link()
        self.pace = Pace(settings.window)
        self.timeline: Timeline | None = None
        self._streams: dict[int, _Stream] = {}
        self._answers: list[Distribution] = []
        self._fed_at = 0.0
        self._judging = False  # trees are at the target, or being judged

    def open(self, sequences: Sequence[Sequencing]) -> None:
        for sequence in sequences:
            # The target adds a token behind the last candidate.
            end = len(sequence.tokens) + sequence.room + 1
            self._streams[sequence.slot] = _Stream(sequence, end)
        self._meet()

    def propose(self, sequences: Sequence[Sequencing]) -> list[TokenTree]:
        start = perf_counter()
        self._judging = False
        self._await(sequences)
        trees = [self._tree(sequence) for sequence in sequences]
        self._judging, self._fed_at = True, perf_counter()
        self.resources.stopwatch.waited += self._fed_at - start
        self._mark("wait", start, self._fed_at)
        return trees

    def arrived(self, sequences: Sequence[Sequencing], trees: Sequence[TokenTree]) -> None:
        """The target's forward is over: the candidate behind each tree, if it is here by now, can
        be judged too."""
        now = perf_counter()
        self.pace.verified(now - self._fed_at)
        self._mark("verify", self._fed_at, now, fed=[len(tree) for tree in trees])
        self._receive()
        for sequence, tree in zip(sequences, trees, strict=True):
            stream = self._streams[sequence.slot]
            tree.fed = len(tree)
            if (
                self._knows(stream)
                and len(stream.tokens) > len(tree)
                and len(tree) <= sequence.room
            ):
                self._add(tree, stream, len(tree))

    def observe(self, sequence: Sequencing, outcome: Outcome) -> None:
        stream, accepted, judged = self._streams[sequence.slot], outcome.accepted, len(outcome.tree)
        everything = accepted == judged
        late = judged > outcome.tree.fed
        self.pace.judged(accepted, rejected=not everything)
        own = None if everything and late else sequence.tokens[-1]
        length = len(sequence.tokens) - (own is not None)
        stream.serial, stream.paused = next(_SERIALS), False
        if own is not None:
            stream.own[length] = stream.serial
        kept = accepted
        if everything and own is not None and len(stream.tokens) > accepted:
            # It came too late to be judged: the target has said itself what stands there.
            everything, kept = stream.tokens[accepted] == own, accepted + 1
        if everything:
            del stream.tokens[:kept], stream.probabilities[:kept]
        else:
            stream.clear()
            stream.needs = stream.serial
        if stream.outdated and self._knows(stream):
            self._introduce(stream)
        elif self._knows(stream):
            self.link.send(Commit(sequence.slot, stream.serial, length, own, judged, accepted))
        self._meet()
        stream.outdated = False

    def close(self, sequence: Sequencing) -> None:
        stream = self._streams.pop(sequence.slot)
        if self._knows(stream):
            self.link.send(End(sequence.slot))

    # What is said

    def _knows(self, stream: _Stream) -> bool:
        link = self.link
        return link.connected and link.configured is self and stream.draft == link.number

    def _meet(self) -> None:
        """Tell a draft that has come all that it has to know."""
        link = self.link
        if not link.connected:
            return
        if link.configured is not self:
            resources, settings = self.resources, self.settings
            facts = resources.slots, settings.ahead, resources.vocab_size, resources.eos_token_ids
            link.send(Configure(settings.drafter, *facts))
            link.configured = self
        for stream in self._streams.values():
            if stream.draft != link.number:
                self._introduce(stream)

    def _introduce(self, stream: _Stream, candidates: Sequence[int] = ()) -> None:
        """Tell the draft a slot's text, and the `candidates` behind it."""
        sequence = stream.sequence
        tokens = [*sequence.tokens, *candidates]
        stream.serial = stream.needs = next(_SERIALS)
        stream.draft, stream.outdated = self.link.number, self._judging
        stream.clear()
        seed = sequence.random.noise.seed
        self.link.send(
            Begin(sequence.slot, stream.serial, tokens, stream.end, sequence.sampling, seed)
        )

    # What is heard

    def _await(self, sequences: Sequence[Sequencing]) -> None:
        """Give the draft time for as many candidates as are worth waiting for."""
        self._receive()
        self._meet()
        wait = self.settings.wait
        if wait is None:
            wait = self.pace.wait()
        if wait == 0:
            return
        expected = wait * self.pace.t_draft + self.pace.t_notice
        patience = max(_PATIENCE * expected, _LEAST_PATIENCE)
        start = perf_counter()
        empty = any(not self._streams[s.slot].tokens for s in sequences)
        while (left := start + patience - perf_counter()) > 0:
            if not any(self._lacks(sequence, wait) for sequence in sequences):
                if empty:
                    self.pace.waited(wait, perf_counter() - start)
                return
            if not self._receive(left):
                return

    def _lacks(self, sequence: Sequencing, wait: int) -> bool:
        stream = self._streams[sequence.slot]
        enough = len(stream.tokens) >= min(wait, sequence.room) or stream.paused
        return not enough and self._knows(stream)

    def _receive(self, timeout: float = 0.0) -> bool:
        """Take in what the draft has said. Whether it is there."""
        for message in self.link.receive(timeout):
            match message:
                case Drafted():
                    self._drafted(message)
                case Pause():
                    stream = self._streams.get(message.slot)
                    if stream is not None and message.serial == stream.serial:
                        stream.paused = True
                case Distribution():
                    self._answers.append(message)
        return self.link.connected

    def _drafted(self, message: Drafted) -> None:
        seconds = (message.ended - message.began) / max(len(message.tokens), 1)
        self.pace.drafted(seconds)
        stream = self._streams.get(message.slot)
        useless = True
        if stream is not None and message.serial <= stream.serial:
            stream.forwards += message.forwards
            useless = not self._take(stream, message)
        began, ended = (time + self.link.offset for time in (message.began, message.ended))
        self._mark("draft", began, ended, by="draft", useless=useless)

    def _take(self, stream: _Stream, message: Drafted) -> bool:
        """Whether the tokens continue the text, as far as it is known and drafted."""
        if message.serial < stream.needs:
            return False
        text = stream.sequence.tokens
        chances = message.probabilities or [None] * len(message.tokens)
        for place, (token, chance) in enumerate(
            zip(message.tokens, chances, strict=True), message.start
        ):
            if place < len(text):
                # The target was first, and added this token itself.
                if text[place] != token:
                    stream.needs = stream.own[place]
                    return False
            elif place == len(text) + len(stream.tokens):
                stream.tokens.append(token)
                stream.probabilities.append(chance)
            else:
                raise RuntimeError(f"a candidate for place {place}, expected another")
        return True

    # What is made of it

    def _tree(self, sequence: Sequencing) -> TokenTree:
        stream, tree = self._streams[sequence.slot], TokenTree()
        if not self._knows(stream):
            stream.clear()  # who drafted them cannot be asked about them any more
        for place in range(min(len(stream.tokens), sequence.room, self.settings.window)):
            self._add(tree, stream, place)
        tree.draft_forwards = tree.draft_tokens = stream.forwards
        stream.forwards = 0
        return tree

    def _add(self, tree: TokenTree, stream: _Stream, place: int) -> None:
        chance, source = stream.probabilities[place], None
        if chance is not None:
            position = len(stream.sequence.tokens) + place
            source = Elsewhere(chance, partial(self._fetch, stream, position, tree))
        tree.add(stream.tokens[place], len(tree) - 1, Origin.DRAFT, source)

    def _fetch(self, stream: _Stream, position: int, tree: TokenTree) -> Tensor:
        """What the candidate for a position was drawn from. It was rejected: to go on without an
        answer would not be exact, so a draft that has died is waited for, and asked anew."""
        slot, until = stream.sequence.slot, perf_counter() + _RETURN
        asked = 0
        while perf_counter() < until:
            if self.link.connected and asked != self.link.number:
                if not self._knows(stream):
                    behind = position - len(stream.sequence.tokens)
                    stream.draft = self.link.number  # more of its text is told than of others
                    self._meet()
                    self._introduce(stream, tree.tokens[:behind])
                self.link.send(Ask(slot, position))
                asked = self.link.number
            self._receive(0.05)
            for answer in self._answers:
                if (answer.slot, answer.position) == (slot, position):
                    self._answers.clear()
                    return answer.tensor()
        raise LinkLost("the draft has died and did not come back")

    def _mark(self, what: str, start: float, end: float, by: str = "target", **facts: Any) -> None:
        if self.timeline is not None:
            self.timeline.add(by, what, start, end, **facts)
