"""Candidates from a draft that drafts while the target verifies (PEARL, Liu et al., 2025).

The draft runs elsewhere (:mod:`specdec_core.drafting.pearl.asynchronous_draft`) and sends what it
drafts. A round feeds the candidates that have arrived. Those that arrive while the target is busy
belong to the next round, if the sequence turns out as the draft assumed (post-verification). The
first of them is verified with this round's last distribution, where otherwise the target would add
its own token. So a round that feeds no candidate is PEARL's pre-verification. Beyond PEARL, the
draft also drafts after tokens that the target may choose in place of a candidate. When the target
chooses such a token, its continuation is drafted already.

Every candidate is verified by the rule of the request's sampling
(:mod:`specdec_core.tokens.acceptance`), and was drawn without knowing the verdict. So the output is
the target's.

While no draft is connected, rounds have no candidates: decoding is autoregressive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from time import perf_counter

from torch import Tensor

from specdec_core.base.errors import UserError
from specdec_core.base.wire import LinkLost
from specdec_core.drafting.drafter import Drafter, Outcome, Resources, SlotState
from specdec_core.drafting.pearl.link import SocketLink, no_link
from specdec_core.drafting.pearl.messages import (
    Begin,
    Commit,
    Compiling,
    Configure,
    Configured,
    Distribution,
    Drafted,
    End,
    Pause,
    RequestDistribution,
)
from specdec_core.drafting.pearl.pace import DraftPace
from specdec_core.drafting.pearl.settings import PearlSettings
from specdec_core.drafting.pearl.tree import CandidateTree, Node
from specdec_core.tokens.token_tree import RemoteDistribution, TokenOrigin, TokenTree

# The target waits at most this many times longer than expected.
_PATIENCE = 4.0
_LEAST_PATIENCE = 0.005  # seconds
# A draft that dies before it has sent the distribution of a rejected token is waited for.
_RETURN = 600.0  # seconds

# Numbers of the last tokens of the sequences that drafts are sent. Drafted tokens have positive
# ones.
_ROOTS = count(-1, -1)


@dataclass(slots=True)
class _WindowSlot:
    """A slot, and the tokens from the draft that may still be of use: the `tree` after the last
    token of the sequence that the draft is known to have."""

    state: SlotState
    end: int
    sent: int = 0  # tokens of the sequence that the draft was sent
    draft: int = 0  # the number of the draft that has the slot's sequence
    tree: CandidateTree = field(default_factory=lambda: CandidateTree(Node(0, -1, 0, None)))
    paused: int | None = None  # the candidate after which the policy would stop
    compiling: int | None = None  # the draft's last root while it compiled the grammar
    outdated: bool = False  # a round has been verified since the draft was sent a sequence
    fed: int = 0
    forwards: int = 0

    def restart(self, root: int, tokens: Sequence[int]) -> None:
        """The draft is sent the sequence `tokens`; the last one has the number `root`."""
        self.sent, self.paused = len(tokens), None
        self.tree = CandidateTree(Node(root, tokens[-1], len(tokens) - 1, None))

    def add(self, number: int, parent: int, token: int, drawn: bool, chance: float | None) -> None:
        """Add a token that the draft has sent. A token after one that is not in the tree any more
        is ignored."""
        owner, text = self.tree.find(parent), self.state.tokens
        if owner is None:
            return
        node = Node(number, token, owner.position + 1, owner, chance)
        if owner is self.tree.root and node.position < len(text):
            # The target's own token there; the draft now has it, too, unless it guessed another.
            if text[node.position] == token:
                self.tree.root, node.parent = node, None
        elif drawn:
            owner.drawn = node
        else:
            owner.guesses.append(node)

    def follow(self) -> None:
        """Move the root of the tree along the sequence, which has grown."""
        text, root = self.state.tokens, self.tree.root
        while root.position < len(text) - 1:
            following = root.child(text[root.position + 1])
            if following is None:
                root.drawn, root.guesses = None, []
                break
            root = following
        self.tree.root, root.parent = root, None

    def chain(self) -> list[Node]:
        """The candidates that have arrived."""
        confirmed = self.tree.root.position == len(self.state.tokens) - 1
        return self.tree.chain() if confirmed else []


class PearlDrafter(Drafter):
    """Proposes the candidates of an asynchronous draft."""

    def __init__(self, settings: PearlSettings, resources: Resources) -> None:
        self.settings, self.resources = settings, resources
        self.link: SocketLink = (resources.open_link or no_link)()
        self._mark = object()  # in the link while this drafter has configured its draft
        self.pace = DraftPace(settings.window)
        self._slots: dict[int, _WindowSlot] = {}
        self._distributions: list[Distribution] = []
        self._fed_at = 0.0
        self._verifying = False  # from feeding the trees to the next proposal
        self._answer: Configured | None = None  # of the draft that this drafter has configured

    def prepare(self, seconds: float) -> bool:
        until = perf_counter() + seconds
        self._receive()
        self._configure_draft()
        while not (ready := self._is_ready()) and (left := until - perf_counter()) > 0:
            if self._answer is not None and self._answer.refusal is not None:
                raise UserError(self._answer.refusal)
            self._receive(min(left, 1.0))
            self._configure_draft()
        return ready

    def open(self, sequences: Sequence[SlotState]) -> None:
        for state in sequences:
            # The target adds a token after the last candidate.
            end = len(state.tokens) + state.room + 1
            self._slots[state.slot] = _WindowSlot(state, end)
        self._verifying = False
        self._configure_draft()

    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        start = perf_counter()
        self._verifying = False
        self._wait_for_candidates(sequences)
        trees = [self._tree(state) for state in sequences]
        self._verifying, self._fed_at = True, perf_counter()
        self.resources.clock.waited += self._fed_at - start
        return trees

    def arrived(self, sequences: Sequence[SlotState], trees: Sequence[TokenTree]) -> None:
        """After the target's forward: the candidate after each tree, if it has arrived by now, can
        be verified too."""
        now = perf_counter()
        self.pace.t_target.add(now - self._fed_at)
        self._receive()
        for state, tree in zip(sequences, trees, strict=True):
            slot = self._slots[state.slot]
            tree.fed = fed = len(tree)
            most = state.room + 1 if state.speculate is None else state.speculate
            if fed < min(state.room + 1, most) and self._has_text(slot):
                self._extend(tree, slot, fed + 1)

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        accepted, judged = outcome.accepted, len(outcome.tree)
        self.pace.judged(accepted, rejected=accepted < judged)
        self._commit(sequence.slot, judged, accepted, outcome.choices[: outcome.tree.read + 1])

    def missed(self, sequence: SlotState) -> None:
        self._commit(sequence.slot)

    def close(self, sequence: SlotState) -> None:
        slot = self._slots.pop(sequence.slot)
        if self._has_text(slot):
            new = [] if slot.outdated else sequence.tokens[slot.sent :]
            self.link.send(End(sequence.slot, new))

    # Sending

    def _has_text(self, slot: _WindowSlot) -> bool:
        """Whether the draft that is connected was sent this slot's sequence."""
        link = self.link
        return link.connected and link.configured is self._mark and slot.draft == link.number

    def _is_ready(self) -> bool:
        answered = self._answer is not None and self._answer.refusal is None
        return answered and self.link.connected and self.link.configured is self._mark

    def _configure_draft(self) -> None:
        """Send a new draft its configuration and the sequences of all slots."""
        link = self.link
        if not link.connected:
            return
        if link.configured is not self._mark:
            resources, settings = self.resources, self.settings
            shape = resources.slots, settings.ahead, settings.width, settings.least
            facts = resources.vocab_size, resources.eos_token_ids
            link.send(Configure(settings.drafter, *shape, *facts))
            link.configured, self._answer = self._mark, None
        for slot in self._slots.values():
            if slot.draft != link.number:
                self._begin(slot)

    def _commit(
        self, number: int, judged: int = 0, accepted: int = 0, choices: Sequence[int] = ()
    ) -> None:
        """Send the draft the tokens that a slot's sequence has grown by."""
        slot = self._slots[number]
        if self._has_text(slot):
            if slot.outdated:
                self._begin(slot)
            else:
                # All of the sequence: the outcome may be of a part of the round's tree.
                text = slot.state.tokens
                self.link.send(Commit(number, text[slot.sent :], judged, accepted, list(choices)))
                slot.sent = len(text)
                slot.follow()
        self._configure_draft()
        slot.outdated = False

    def _begin(self, slot: _WindowSlot, candidates: Sequence[int] = ()) -> None:
        """Send the draft a slot's sequence, and the `candidates` after it."""
        state, root = slot.state, next(_ROOTS)
        tokens = [*state.tokens, *candidates]
        slot.restart(root, tokens)
        slot.draft, slot.outdated = self.link.number, self._verifying
        seed = state.random.noise.seed
        rules = None if state.warper is None else state.warper.rules
        self.link.send(Begin(state.slot, root, tokens, slot.end, state.sampling, seed, rules))

    # Receiving

    def _wait_for_candidates(self, sequences: Sequence[SlotState]) -> None:
        """Wait for as many candidates as pay."""
        self._receive()
        self._configure_draft()
        wait = self.settings.wait
        if wait is None:
            wait = self.pace.wait()
        if wait == 0:
            return
        expected = wait * self.pace.t_draft.value + self.pace.t_notice.value
        patience = max(_PATIENCE * expected, _LEAST_PATIENCE)
        start = perf_counter()
        empty = any(not self._slots[s.slot].chain() for s in sequences)
        while (left := start + patience - perf_counter()) > 0:
            if not any(self._lacks(state, wait) for state in sequences):
                if empty:
                    self.pace.waited(wait, perf_counter() - start)
                return
            if not self._receive(left):
                return

    def _lacks(self, state: SlotState, wait: int) -> bool:
        """Whether more candidates of a slot are worth waiting for."""
        slot = self._slots[state.slot]
        if not self._has_text(slot) or slot.tree.root.number == slot.compiling:
            return False
        length = 0 if self._answer is None else self._answer.length
        chain = slot.chain()
        paused = any(node.number == slot.paused for node in chain)
        room = min(state.room, length - len(state.tokens) + 1)
        return len(chain) < min(wait, room) and not paused

    def _receive(self, timeout: float = 0.0) -> bool:
        """Handle the draft's messages. Returns whether it is connected."""
        for message in self.link.receive(timeout):
            match message:
                case Drafted():
                    self._add_drafted(message)
                case Pause():
                    if slot := self._slots.get(message.slot):
                        slot.paused = message.node
                case Compiling():
                    if slot := self._slots.get(message.slot):
                        slot.compiling = message.root
                case Distribution():
                    self._distributions.append(message)
                case Configured():
                    self._answer = message
        return self.link.connected

    def _add_drafted(self, message: Drafted) -> None:
        if message.candidates:
            self.pace.t_draft.add((message.ended - message.began) / message.candidates)
        slot = self._slots.get(message.slot)
        if slot is not None:
            slot.forwards += 1
            slot.fed += message.nodes
            for token in message.tokens:
                slot.add(*token)

    # Proposing

    def _tree(self, state: SlotState) -> TokenTree:
        slot, tree = self._slots[state.slot], TokenTree()
        # The distributions of a draft that is gone cannot be requested.
        if self._has_text(slot):
            self._extend(tree, slot, min(state.room, self.settings.window))
        tree.draft_forwards, tree.draft_tokens = slot.forwards, slot.fed
        slot.forwards = slot.fed = 0
        return tree

    def _extend(self, tree: TokenTree, slot: _WindowSlot, length: int) -> None:
        """Extend `tree` to at most `length` candidates."""
        for node in slot.chain()[len(tree) : length]:
            source = None
            if node.chance is not None:
                assert node.parent is not None  # it follows the tree's root
                fetch = partial(self._fetch, slot, slot.draft, node.parent.number, tree.tokens[:])
                source = RemoteDistribution(node.chance, fetch)
            tree.add(node.token, len(tree) - 1, TokenOrigin.DRAFT, source)

    def _fetch(self, slot: _WindowSlot, draft: int, node: int, before: Sequence[int]) -> Tensor:
        """The distribution from which `draft` drew the candidate after `node`, which follows the
        candidates `before`. The candidate was rejected, and resampling without the distribution
        would not be exact. If the draft has died, the next draft that connects sends it."""
        number, until = slot.state.slot, perf_counter() + _RETURN
        asked = 0  # the number of the draft that was asked
        while perf_counter() < until:
            if self.link.connected and asked != self.link.number:
                if draft != self.link.number:
                    draft = self.link.number
                    self._configure_draft()
                    self._begin(slot, before)
                    node = slot.tree.root.number
                self.link.send(RequestDistribution(number, node))
                asked = self.link.number
            self._receive(0.05)
            for answer in self._distributions:
                if (answer.slot, answer.node) == (number, node):
                    self._distributions.clear()
                    return answer.tensor()
        raise LinkLost("the draft has died and did not come back")
