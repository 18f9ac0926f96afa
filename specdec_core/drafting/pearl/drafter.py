"""Candidates from a draft that drafts on while the target verifies (PEARL, Liu et al., 2025).

The draft runs elsewhere (:mod:`specdec_core.drafting.pearl.ahead`) and sends what it drafts. A
round feeds
the candidates that are there. What arrives while the target is busy is the next round's, if the
text turns out to be what the draft took it for (post-verification); and the first of it is judged
with this round's last distribution, where otherwise the target would add a token of its own. So a
round that feeds no candidate is PEARL's pre-verification. Beyond PEARL, the draft also looks behind
what the target may say in place of a candidate: candidates that follow the target's own token are
then there when it is said. Everything is judged by the one rule of verify.py: the output is the
target's, and what is judged was drawn without looking at it.

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

from specdec_core.base.errors import UserError
from specdec_core.base.wire import LinkLost
from specdec_core.drafting.drafter import Drafter, Outcome, Resources, SlotState
from specdec_core.drafting.pearl.messages import (
    Ask,
    Begin,
    Commit,
    Configure,
    Distribution,
    Drafted,
    End,
    Pause,
    Ready,
    Refused,
)
from specdec_core.drafting.pearl.pace import Pace
from specdec_core.drafting.pearl.settings import PearlSettings
from specdec_core.drafting.pearl.timeline import Timeline
from specdec_core.tokens.token_tree import Elsewhere, Origin, TokenTree

# How many times longer than expected a draft may keep the target waiting.
_PATIENCE = 4.0
_LEAST_PATIENCE = 0.005  # seconds
# A draft that has died between drafting a rejected token and saying what from is waited for.
_RETURN = 600.0  # seconds

# Of the texts that drafts are told. Negative: tokens that drafts think of have the others.
_ROOTS = count(-1, -1)


@dataclass(slots=True, eq=False)
class _Sprout:
    """A token that the draft has told of, and what it has told to come behind it."""

    number: int
    token: int = -1
    chance: float | None = None
    drawn: _Sprout | None = None
    guesses: list[_Sprout] = field(default_factory=list)

    def child(self, token: int) -> _Sprout | None:
        if self.drawn is not None and self.drawn.token == token:
            return self.drawn
        return next((guess for guess in self.guesses if guess.token == token), None)


@dataclass(slots=True)
class _Stream:
    """What has come from the draft for a slot, and may still be of use."""

    sequence: SlotState
    end: int
    told: int = 0  # tokens of the text that the draft was told
    draft: int = 0  # the number of the draft that knows the slot's text
    anchor: _Sprout = field(default_factory=partial(_Sprout, 0))
    place: int = 0  # the last of the text's tokens that the draft is known to have heard of: anchor
    known: dict[int, _Sprout] = field(default_factory=dict)  # the anchor, and what is behind it
    paused: int | None = None  # the candidate behind which the policy would stop
    outdated: bool = False  # the draft was told a text that a round has been judged behind since
    places: int = 0
    forwards: int = 0

    def restart(self, root: int, length: int) -> None:
        """The draft is told a text of so many tokens, whose last one has this number."""
        self.place, self.told, self.paused = length - 1, length, None
        self._move(_Sprout(root))

    def take(self, number: int, parent: int, token: int, drawn: bool, chance: float | None) -> bool:
        """A token was told of. Whether it may be of use."""
        owner, text = self.known.get(parent), self.sequence.tokens
        if owner is None:
            return False
        sprout = _Sprout(number, token, chance)
        if owner is self.anchor and self.place < len(text) - 1:
            if text[self.place + 1] != token:
                return False  # the target was first, and said another
            self.place += 1
            self._move(sprout)
            return True
        if drawn:
            owner.drawn = sprout
        else:
            owner.guesses.append(sprout)
        self.known[number] = sprout
        return True

    def follow(self) -> None:
        """The text has grown."""
        text = self.sequence.tokens
        while self.place < len(text) - 1:
            following = self.anchor.child(text[self.place + 1])
            if following is None:
                self.anchor.drawn, self.anchor.guesses = None, []
                self.known = {self.anchor.number: self.anchor}
                return
            self.place += 1
            self.anchor = following
        self._move(self.anchor)

    def _move(self, anchor: _Sprout) -> None:
        self.anchor, self.known = anchor, {}
        behind = [anchor]
        while behind:
            sprout = behind.pop()
            self.known[sprout.number] = sprout
            behind += sprout.guesses
            if sprout.drawn is not None:
                behind.append(sprout.drawn)

    def chain(self) -> list[_Sprout]:
        """The candidates that are here."""
        found: list[_Sprout] = []
        if self.place == len(self.sequence.tokens) - 1:
            sprout = self.anchor.drawn
            while sprout is not None:
                found.append(sprout)
                sprout = sprout.drawn
        return found


class PearlDrafter(Drafter):
    """Proposes what a draft elsewhere has drafted."""

    def __init__(self, settings: PearlSettings, resources: Resources) -> None:
        self.settings, self.resources = settings, resources
        self.link = resources.open_link()
        self.pace = Pace(settings.window)
        self.timeline: Timeline | None = None
        self._streams: dict[int, _Stream] = {}
        self._answers: list[Distribution] = []
        self._fed_at = 0.0
        self._judging = False  # trees are at the target, or being judged
        self._ready = False
        self._refused: str | None = None  # why the draft cannot do what it was told to
        self._meet()

    def prepare(self, seconds: float) -> bool:
        until = perf_counter() + seconds
        self._receive()
        self._meet()
        while not (ready := self._is_ready()) and (left := until - perf_counter()) > 0:
            if self._refused is not None:
                raise UserError(self._refused)
            self._receive(min(left, 1.0))
            self._meet()
        return ready

    def open(self, sequences: Sequence[SlotState]) -> None:
        for sequence in sequences:
            # The target adds a token behind the last candidate.
            end = len(sequence.tokens) + sequence.room + 1
            self._streams[sequence.slot] = _Stream(sequence, end)
        self._judging = False
        self._meet()

    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        start = perf_counter()
        self._judging = False
        self._await(sequences)
        trees = [self._tree(sequence) for sequence in sequences]
        self._judging, self._fed_at = True, perf_counter()
        self.resources.clock.waited += self._fed_at - start
        self._mark("wait", start, self._fed_at)
        return trees

    def arrived(self, sequences: Sequence[SlotState], trees: Sequence[TokenTree]) -> None:
        """The target's forward is over: the candidate behind each tree, if it is here by now, can
        be judged too."""
        now = perf_counter()
        self.pace.verified(now - self._fed_at)
        self._mark("verify", self._fed_at, now, fed=[len(tree) for tree in trees])
        self._receive()
        for sequence, tree in zip(sequences, trees, strict=True):
            stream = self._streams[sequence.slot]
            tree.fed = fed = len(tree)
            if fed <= sequence.room and self._knows(stream):
                self._extend(tree, stream, fed + 1)

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        accepted, judged = outcome.accepted, len(outcome.tree)
        self.pace.judged(accepted, rejected=accepted < judged)
        self._tell(sequence.slot, judged, accepted, outcome.choices[: outcome.tree.read + 1])

    def missed(self, sequence: SlotState) -> None:
        self._tell(sequence.slot)

    def close(self, sequence: SlotState) -> None:
        stream = self._streams.pop(sequence.slot)
        if self._knows(stream):
            new = [] if stream.outdated else sequence.tokens[stream.told :]
            self.link.send(End(sequence.slot, new))

    # What is said

    def _knows(self, stream: _Stream) -> bool:
        link = self.link
        return link.connected and link.configured is self and stream.draft == link.number

    def _is_ready(self) -> bool:
        return self._ready and self.link.connected and self.link.configured is self

    def _meet(self) -> None:
        """Tell a draft that has come all that it has to know."""
        link = self.link
        if not link.connected:
            return
        if link.configured is not self:
            resources, settings = self.resources, self.settings
            shape = resources.slots, settings.ahead, settings.width, settings.least
            facts = resources.vocab_size, resources.eos_token_ids
            link.send(Configure(settings.drafter, *shape, *facts))
            link.configured, self._ready, self._refused = self, False, None
        for stream in self._streams.values():
            if stream.draft != link.number:
                self._introduce(stream)

    def _tell(
        self, slot: int, judged: int = 0, accepted: int = 0, choices: Sequence[int] = ()
    ) -> None:
        """Tell the draft how a slot's text goes on."""
        stream = self._streams[slot]
        if self._knows(stream):
            if stream.outdated:
                self._introduce(stream)
            else:
                # All of it: of a round that it has proposed a part of it may be shown less.
                text = stream.sequence.tokens
                start = perf_counter()
                self.link.send(Commit(slot, text[stream.told :], judged, accepted, list(choices)))
                self._mark("talk", start, perf_counter())
                stream.told = len(text)
                stream.follow()
        self._meet()
        stream.outdated = False

    def _introduce(self, stream: _Stream, candidates: Sequence[int] = ()) -> None:
        """Tell the draft a slot's text, and the `candidates` behind it."""
        sequence, root = stream.sequence, next(_ROOTS)
        tokens = [*sequence.tokens, *candidates]
        stream.restart(root, len(tokens))
        stream.draft, stream.outdated = self.link.number, self._judging
        seed = sequence.random.noise.seed
        self.link.send(Begin(sequence.slot, root, tokens, stream.end, sequence.sampling, seed))

    # What is heard

    def _await(self, sequences: Sequence[SlotState]) -> None:
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
        empty = any(not self._streams[s.slot].chain() for s in sequences)
        while (left := start + patience - perf_counter()) > 0:
            if not any(self._lacks(sequence, wait) for sequence in sequences):
                if empty:
                    self.pace.waited(wait, perf_counter() - start)
                return
            if not self._receive(left):
                return

    def _lacks(self, sequence: SlotState, wait: int) -> bool:
        stream = self._streams[sequence.slot]
        if not self._knows(stream):
            return False
        chain = stream.chain()
        paused = any(sprout.number == stream.paused for sprout in chain)
        return len(chain) < min(wait, sequence.room) and not paused

    def _receive(self, timeout: float = 0.0) -> bool:
        """Take in what the draft has said. Whether it is there."""
        start = perf_counter()
        for message in self.link.receive(timeout):
            match message:
                case Drafted():
                    self._drafted(message)
                case Pause():
                    if stream := self._streams.get(message.slot):
                        stream.paused = message.node
                case Distribution():
                    self._answers.append(message)
                case Ready():
                    self._ready = True
                case Refused():
                    self._refused = message.reason
        if not timeout:
            self._mark("talk", start, perf_counter())
        return self.link.connected

    def _drafted(self, message: Drafted) -> None:
        if message.candidates:
            self.pace.drafted((message.ended - message.began) / message.candidates)
        stream = self._streams.get(message.slot)
        useful = False
        if stream is not None:
            stream.forwards += 1
            stream.places += message.places
            useful = any([stream.take(*sprout) for sprout in message.sprouts])
        if self.timeline is not None:
            began, ended = (time + self.link.offset for time in (message.began, message.ended))
            self._mark("draft", began, ended, by="draft", useless=not useful)

    # What is made of it

    def _tree(self, sequence: SlotState) -> TokenTree:
        stream, tree = self._streams[sequence.slot], TokenTree()
        # Who drafted them cannot be asked about them when the draft is another by now.
        if self._knows(stream):
            self._extend(tree, stream, min(sequence.room, self.settings.window))
        tree.draft_forwards, tree.draft_tokens = stream.forwards, stream.places
        stream.forwards = stream.places = 0
        return tree

    def _extend(self, tree: TokenTree, stream: _Stream, length: int) -> None:
        """Make `tree` so long, where so much has come."""
        parent = stream.anchor.number
        for place, sprout in enumerate(stream.chain()[:length]):
            if place >= len(tree):
                self._add(tree, stream, parent, sprout)
            parent = sprout.number

    def _add(self, tree: TokenTree, stream: _Stream, parent: int, sprout: _Sprout) -> None:
        source = None
        if sprout.chance is not None:
            fetch = partial(self._fetch, stream, stream.draft, parent, tree.tokens[:])
            source = Elsewhere(sprout.chance, fetch)
        tree.add(sprout.token, len(tree) - 1, Origin.DRAFT, source)

    def _fetch(self, stream: _Stream, draft: int, node: int, before: Sequence[int]) -> Tensor:
        """What `draft` drew the candidate behind this node from, `before` which there are others.
        The candidate was rejected: to go on without an answer would not be exact, so a draft that
        has died is waited for, and its successor asked."""
        slot, until = stream.sequence.slot, perf_counter() + _RETURN
        asked = 0
        while perf_counter() < until:
            if self.link.connected and asked != self.link.number:
                if draft != self.link.number:
                    draft = self.link.number
                    self._meet()
                    self._introduce(stream, before)
                    node = stream.anchor.number
                self.link.send(Ask(slot, node))
                asked = self.link.number
            self._receive(0.05)
            for answer in self._answers:
                if (answer.slot, answer.node) == (slot, node):
                    self._answers.clear()
                    return answer.tensor()
        raise LinkLost("the draft has died and did not come back")

    def _mark(self, what: str, start: float, end: float, by: str = "target", **facts: Any) -> None:
        if self.timeline is not None:
            self.timeline.add(by, what, start, end, **facts)
