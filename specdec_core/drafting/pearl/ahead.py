"""The draft's side: draft on and on, until told that the text is another.

The draft takes its own candidates for the text until the target says what the text is, and beside
them looks behind what the target may say instead (:mod:`specdec_core.drafting.pearl.canopy`).
Whatever a
forward brings is sent at once, and before every forward it is heard what the target has said.

A lookup, if there is one, guesses how the chain goes on. The draft reads the guesses behind the
chain's end and draws a token at each of them, as far as these are what was guessed: as many tokens
of the chain then come of one forward (a cascade). So each of them is drawn from the draft's own
distribution, guessed or not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

import torch

from specdec_core.base.errors import UserError
from specdec_core.drafting.drafter import Lookup, Outcome, Resources, SlotState
from specdec_core.drafting.heads.storage import load_pair_head
from specdec_core.drafting.pearl.canopy import Canopy, Node
from specdec_core.drafting.pearl.look import Look
from specdec_core.drafting.pearl.messages import (
    Ask,
    Begin,
    Commit,
    Configure,
    Distribution,
    Drafted,
    End,
    Ready,
    Refused,
    Sprout,
)
from specdec_core.drafting.pearl.windows import Windows
from specdec_core.models.pair import Pair
from specdec_core.models.runner import ModelRunner
from specdec_core.tokens.sampling import RandomStream
from specdec_core.tokens.token_tree import ROOT, Origin, TokenTree

_GUESSES = 2  # at what the target may say in place of a drawn token
_AT_ONCE = 16  # tokens that a draft reads of a text that it is behind of
_TRIED = 32  # guesses of a lookup that are tried at once
_READ = 96  # nodes of a tree in the cache, guesses that are tried among them


@dataclass(slots=True)
class _Slot:
    sequence: SlotState  # its tokens are what the target has confirmed
    canopy: Canopy
    end: int

    @property
    def number(self) -> int:
        return self.sequence.slot


class Ahead:
    """Drafts ahead of the target for all slots.

    `send` reaches the target's side. `salt` makes this draft's random numbers its own. Of the pair
    only the drafts are needed.
    """

    def __init__(self, pair: Pair, send: Callable[[Any], None], salt: str = "") -> None:
        self._pair, self._send, self._salt = pair, send, salt
        self._runners: dict[tuple[str, int], ModelRunner] = {}
        self._slots: dict[int, _Slot] = {}
        self._numbers, self._forwards = count(1), count()
        self._settings: Configure
        self._runner: ModelRunner
        self._windows: Windows
        self._lookup: Lookup | None = None
        self._able = False  # to draft in the way that it was last told to

    def handle(self, message: Any) -> None:
        """Heed what the target's side says."""
        if isinstance(message, Configure):
            self._slots.clear()
            try:
                self._configure(message)
                self._able = True
                self._send(Ready())
            except UserError as error:
                self._able = False
                self._send(Refused(str(error)))
        elif self._able:
            self._heed(message)

    @torch.inference_mode()
    def _heed(self, message: Any) -> None:
        match message:
            case Begin():
                self._begin(message)
            case Commit():
                self._commit(message)
            case Ask():
                self._answer(message)
            case End():
                self._end(message)

    @torch.inference_mode()
    def draft(self) -> bool:
        """Read what is worth it of all slots' trees, in one forward; whether there is any."""
        picked, tried = {}, {}
        for number, slot in self._slots.items():
            if nodes := self._pick(slot):
                picked[number] = nodes
                tried[number] = self._guesses(slot, nodes)
        if picked:
            self._read(picked, tried)
        return bool(picked)

    def _pick(self, slot: _Slot) -> list[Node]:
        """What to read of a tree: the chain's end first."""
        canopy, settings, end = slot.canopy, self._settings, self._end_of(slot)
        chain: list[Node] = []
        if canopy.tip.position + 1 < end and not self._final(canopy):
            chain = canopy.chain()[:_AT_ONCE]
        final = settings.eos_token_ids
        return chain + canopy.likely(settings.width - 1, settings.least, end, final)

    def _end_of(self, slot: _Slot) -> int:
        """The position before which there may be tokens now."""
        return min(slot.canopy.root.position + 1 + self._settings.ahead, slot.end)

    def _guesses(self, slot: _Slot, nodes: Sequence[Node]) -> list[Node]:
        """What a lookup says comes behind the chain's end, if that is to be read: nodes that may
        be read with it."""
        canopy = slot.canopy
        tried: list[Node] = []
        # A token comes from the draft model itself.
        room = self._end_of(slot) - canopy.tip.position - 2
        if self._lookup is None or room <= 0 or canopy.tip not in nodes:
            return tried
        tree = self._lookup.find(slot.sequence, canopy.drawn(), room).tree
        most = min(_TRIED, _READ - len(canopy.read) - len(nodes))
        for token, parent in zip(tree.tokens[: max(most, 0)], tree.parents, strict=False):
            before = canopy.tip if parent == ROOT else tried[parent]
            node = Node(next(self._numbers), token, before.position + 1, before)
            before.guesses.append(node)
            tried.append(node)
        return tried

    def _final(self, canopy: Canopy) -> bool:
        """Whether the chain ends a text. One that the target has confirmed goes on."""
        return canopy.tip is not canopy.root and canopy.tip.token in self._settings.eos_token_ids

    def _read(
        self, picked: Mapping[int, Sequence[Node]], tried: Mapping[int, Sequence[Node]]
    ) -> None:
        """Feed the draft these nodes of these slots, and behind them those `tried`; and put behind
        them what it says."""
        began = perf_counter()
        slots = [self._slots[number] for number in picked]
        fed = [[*nodes, *tried.get(number, ())] for number, nodes in picked.items()]
        ends = [slot.canopy.tip.position for slot in slots]
        for slot, nodes in zip(slots, fed, strict=True):
            slot.canopy.enter(nodes)
        look = Look.of(
            self._runner,
            [slot.sequence for slot in slots],
            fed,
            [slot.canopy.parents for slot in slots],
        )
        sprouts = self._sprout(look, {node for own in tried.values() for node in own})
        ended = perf_counter()
        for slot, nodes, end in zip(slots, fed, ends, strict=True):
            number, candidates = slot.number, slot.canopy.tip.position - end
            self._send(Drafted(number, sprouts[number], len(nodes), candidates, began, ended))
            if guessed := tried.get(number):
                self._keep(slot, slot.canopy.settle(guessed))
        self._pause()

    def _sprout(self, look: Look, tried: Set[Node]) -> dict[int, list[Sprout]]:
        """Put behind each node the token that the draft draws there, and guesses at others; behind
        nodes that are `tried` only if the chain comes to them. All that is new, by slot."""
        guesses, least = _GUESSES if self._settings.width > 1 else 0, self._settings.least
        most = min(guesses + 1, look.likely.shape[-1])
        best = look.likely.topk(most, dim=-1)
        tokens, values = best.indices.tolist(), best.values.tolist()
        drawn = {n: (tokens[n][0], values[n][0]) for n in range(len(look.nodes))}
        drawn |= look.draws()
        sprouts: dict[int, list[Sprout]] = {sequence.slot: [] for sequence in look.sequences}
        grown: list[int] = []
        for n, (sequence, node) in enumerate(zip(look.sequences, look.nodes, strict=True)):
            new, canopy = sprouts[sequence.slot], self._slots[sequence.slot].canopy
            if node in tried and (node is not canopy.tip or self._final(canopy)):
                continue
            if node.parent is not None and not node.told:
                new.append((node.number, node.parent.number, node.token, False, None))
                node.told = True
            if node.position < canopy.root.position:
                continue  # what comes behind it is known
            token, chance = drawn[n]
            # As if the target accepted what the draft is sure of, and else drew from the rest.
            sure = min(values[n][0], 1.0)
            rest = (1 - sure) / max(1 - chance, 1e-6)
            others = [
                self._node(guess, node, value * rest)
                for guess, value in zip(tokens[n], values[n], strict=True)
                if guess != token and value * rest > least
            ]
            first = self._node(token, node, sure)
            canopy.grow(node, first, others[:guesses])
            grown.append(n)
            new.append((first.number, node.number, token, True, chance if look.exact(n) else None))
            first.told = True
        for n, source in zip(grown, look.sources(grown, next(self._forwards)), strict=True):
            look.nodes[n].source = source
        return sprouts

    def _node(self, token: int, parent: Node, chance: float) -> Node:
        """A token behind `parent`: the node that is tried there with that token, or a new one."""
        node = parent.child(token)
        if node is None:
            node = Node(next(self._numbers), token, parent.position + 1, parent)
        node.score = parent.score + math.log(max(chance, 1e-9))
        return node

    def _pause(self) -> None:
        """Say where the policy would stop the chains as they are now."""
        for pause in self._windows.grow():
            self._send(pause)

    def _configure(self, message: Configure) -> None:
        settings, guesses = message.drafter, message.drafter.guesses
        key = self._pair.draft_name(settings.draft), message.slots
        if key not in self._runners:
            self._runners[key] = self._pair.open_runner(*key)
        for runner in self._runners.values():
            runner.watch_hidden(False)
            runner.widen(2 if guesses or message.width > 1 else 1)
        resources = Resources(
            lambda name: self._runner,
            partial(load_pair_head, self._pair),
            message.vocab_size,
            message.eos_token_ids,
            lambda: self._pair.tokenizer_digest,
            slots=message.slots,
        )
        policy = resources.policy(settings.draft, settings.policy)
        self._windows = Windows(policy, message.eos_token_ids)
        self._runner, self._settings = self._runners[key], message
        if policy.needs_hidden:
            self._runner.watch_hidden(True)
        self._lookup = None if guesses is None else resources.lookup(guesses)

    def _begin(self, message: Begin) -> None:
        number, text = message.slot, message.tokens
        stream = RandomStream(message.seed, self._settings.vocab_size)
        # Independent of the target's own uniform numbers; coupled noise must be the same.
        stream.uniform = random.Random(f"{message.seed} {message.root} {self._salt}").random
        canopy = Canopy(Node(message.root, text[-1], len(text) - 1, None, told=True))
        sequence = SlotState(number, list(text), message.sampling, stream)
        self._slots[number] = _Slot(sequence, canopy, message.end)
        self._windows.begin(number, canopy.root)
        if self._lookup is not None:
            self._lookup.open([sequence])
        self._runner.truncate(number, 0)
        if text[:-1]:
            self._runner.prefill([number], [text[:-1]])

    def _commit(self, message: Commit) -> None:
        slot, tokens = self._slots[message.slot], message.tokens
        self._learn(slot, message)
        agreed = slot.canopy.agreed(tokens)
        self._keep(slot, slot.canopy.confirm(tokens, self._numbers))
        self._windows.confirm(slot.number, slot.canopy.root, agreed, agreed < len(tokens))
        self._pause()

    def _learn(self, slot: _Slot, message: Commit) -> None:
        """Let the lookup know what became of the chain."""
        text, own = slot.sequence.tokens, message.accepted + 1
        text += message.tokens[:own]
        if self._lookup is not None and message.drafted:
            read = len(message.choices) - 1
            tree = TokenTree.chain(slot.canopy.drawn()[: message.drafted][:read], Origin.DRAFT)
            path = list(range(min(message.accepted, len(tree))))
            self._lookup.observe(slot.sequence, Outcome(tree, path, message.choices, 0.0))
        text += message.tokens[own:]

    def _end(self, message: End) -> None:
        slot = self._slots.pop(message.slot, None)
        if slot is None:
            return
        self._windows.end(slot.number)
        if self._lookup is not None:
            slot.sequence.tokens += message.tokens
            self._lookup.close(slot.sequence)

    def _keep(self, slot: _Slot, places: Sequence[int]) -> None:
        """Of the tree in the cache only these places are kept: they are behind one another now."""
        tree = slot.canopy
        self._runner.keep(slot.number, tree.plain + len(tree.read) - len(places), places)

    def _answer(self, message: Ask) -> None:
        """Where another draft drew the token, of whom there was to learn, the distribution is made
        anew."""
        slot = self._slots[message.slot]
        node = slot.canopy.find(message.node)
        if node.source is None:
            self._read({slot.number: slot.canopy.chain()}, {})
        assert node.source is not None
        assert node.source.probs is not None  # nobody else asks
        self._send(Distribution.of(slot.number, message.node, node.source.probs))
