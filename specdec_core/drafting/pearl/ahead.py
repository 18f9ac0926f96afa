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
from torch import Tensor

from specdec_core.base.errors import UserError
from specdec_core.config import Sampling
from specdec_core.drafting.drafter import Lookup, Outcome, Resources, Sequencing
from specdec_core.drafting.heads.storage import load_pair_head
from specdec_core.drafting.pearl.canopy import Canopy, Node
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
    Sprout,
)
from specdec_core.drafting.policies.policy import LengthPolicy
from specdec_core.drafting.policies.signals import Signals
from specdec_core.models.pair import Pair
from specdec_core.models.runner import ModelRunner
from specdec_core.tokens.sampling import RandomStream, distributions, quantile
from specdec_core.tokens.token_tree import ROOT, Origin, TokenTree

_GUESSES = 2  # at what the target may say in place of a drawn token
_AT_ONCE = 16  # tokens that a draft reads of a text that it is behind of
_TRIED = 32  # guesses of a lookup that are tried at once
_READ = 96  # nodes of a tree in the cache, guesses that are tried among them


@dataclass(slots=True)
class _Slot:
    sequence: Sequencing  # its tokens are what the target has confirmed
    canopy: Canopy
    end: int
    drafted: int = 0  # tokens that the policy has seen of the chain since it began anew

    @property
    def number(self) -> int:
        return self.sequence.slot


@dataclass(slots=True)
class _Look:
    """What a forward says at places of several trees: `logits` (n, vocabulary), under sampling the
    distributions `probs`, and `likely`, how confident the draft is in each token."""

    slots: list[_Slot]
    nodes: list[Node]
    logits: Tensor
    hidden: Tensor | None
    probs: Tensor | None
    likely: Tensor


class Ahead:
    """Drafts ahead of the target for all slots.

    `send` reaches the target's side. `salt` makes this draft's random numbers its own. Of the pair
    only the drafts are needed.
    """

    def __init__(self, pair: Pair, send: Callable[[Any], None], salt: str = "") -> None:
        self._pair, self._send, self._salt = pair, send, salt
        self._runners: dict[tuple[str, int], ModelRunner] = {}
        self._slots: dict[int, _Slot] = {}
        self._numbers = count(1)
        self._settings: Configure
        self._runner: ModelRunner
        self._policy: LengthPolicy
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
        canopy, tried = slot.canopy, []
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
        for slot, nodes in zip(slots, fed, strict=True):
            slot.canopy.enter(nodes)
        look = self._look(slots, fed)
        sprouts, grown = self._sprout(look, {node for own in tried.values() for node in own})
        ended = perf_counter()
        for slot, nodes in zip(slots, fed, strict=True):
            number, new = slot.number, grown.get(slot.number, ())
            self._send(Drafted(number, sprouts[number], len(nodes), len(new), began, ended))
            if guessed := tried.get(number):
                self._keep(slot, slot.canopy.settle(guessed))
        while grown:
            self._ask_policy(look, [places[0] for places in grown.values()])
            grown = {number: places[1:] for number, places in grown.items() if places[1:]}

    def _look(self, slots: list[_Slot], nodes: list[list[Node]]) -> _Look:
        feed = [[node.token for node in own] for own in nodes]
        parents = [slot.canopy.parents for slot in slots]
        chains = all(own == list(range(-1, len(own) - 1)) for own in parents)
        runner = self._runner
        logits = runner.forward([s.number for s in slots], feed, None if chains else parents)
        counts = [len(own) for own in nodes]
        logits, hidden = _own(logits, counts), runner.hidden
        owners = [slot for slot, own in zip(slots, nodes, strict=True) for _ in own]
        flat = [node for own in nodes for node in own]
        probs = distributions(logits, [slot.sequence.sampling for slot in owners])
        likely = logits.float().softmax(dim=-1) if probs is None else probs
        coupled = [n for n, slot in enumerate(owners) if _coupled(slot.sequence.sampling)]
        if coupled:
            likely = likely.clone()
            size = self._settings.vocab_size
            for n in coupled:
                noise = owners[n].sequence.random.noise.at(flat[n].position + 1, size)
                raced = likely[n] / noise[: likely.shape[-1]].to(likely.device)
                likely[n] = raced / raced.sum()
        return _Look(
            owners, flat, logits, None if hidden is None else _own(hidden, counts), probs, likely
        )

    def _sprout(
        self, look: _Look, tried: Set[Node]
    ) -> tuple[dict[int, list[Sprout]], dict[int, list[int]]]:
        """Put behind each node the token that the draft draws there, and guesses at others; behind
        nodes that are `tried` only if the chain comes to them. All that is new, by slot, and the
        places where the chain has grown."""
        guesses, least = _GUESSES if self._settings.width > 1 else 0, self._settings.least
        most = min(guesses + 1, look.likely.shape[-1])
        best = look.likely.topk(most, dim=-1)
        tokens, values = best.indices.tolist(), best.values.tolist()
        drawn = {n: (tokens[n][0], values[n][0]) for n in range(len(look.nodes))}
        drawn |= self._draws(look)
        sprouts: dict[int, list[Sprout]] = {slot.number: [] for slot in look.slots}
        grown: dict[int, list[int]] = {}
        for n, (slot, node) in enumerate(zip(look.slots, look.nodes, strict=True)):
            if node in tried and (node is not slot.canopy.tip or self._final(slot.canopy)):
                continue
            new = sprouts[slot.number]
            if not node.told:
                new.append((node.number, node.parent.number, node.token, False, None))
                node.told = True
            if node.position < slot.canopy.root.position:
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
            if node is slot.canopy.tip:
                grown.setdefault(slot.number, []).append(n)
            slot.canopy.grow(node, first, others[:guesses])
            exact = _rejection(slot.sequence.sampling)
            if exact:
                node.behind = look.probs[n]
            new.append((first.number, node.number, token, True, chance if exact else None))
            first.told = True
        return sprouts, grown

    def _draws(self, look: _Look) -> dict[int, tuple[int, float]]:
        """By place the tokens that are drawn there for rejection sampling, and their chances."""
        places = [n for n, slot in enumerate(look.slots) if _rejection(slot.sequence.sampling)]
        if not places:
            return {}
        own = look.probs[places]
        uniforms = [look.slots[n].sequence.random.uniform() for n in places]
        tokens = quantile(own, uniforms)
        chances = own.gather(1, tokens[:, None])[:, 0].tolist()
        return dict(zip(places, zip(tokens.tolist(), chances, strict=True), strict=True))

    def _node(self, token: int, parent: Node, chance: float) -> Node:
        """A token behind `parent`: the node that is tried there with that token, or a new one."""
        node = parent.child(token)
        if node is None:
            node = Node(next(self._numbers), token, parent.position + 1, parent)
        node.score = parent.score + math.log(max(chance, 1e-9))
        return node

    def _ask_policy(self, look: _Look, places: Sequence[int]) -> None:
        """Where the policy would stop behind a chain's new token, one of each slot, say so; and
        begin anew."""
        policy = self._policy
        own = [look.slots[n] for n in places]
        new = [look.nodes[n].drawn for n in places]
        for slot in own:
            slot.drafted += 1
        limits = [policy.limit(slot.number, len(self._slots)) for slot in own]
        final = self._settings.eos_token_ids
        ends = [
            slot.drafted >= limit or node.token in final
            for slot, node, limit in zip(own, new, limits, strict=True)
        ]
        shown = [n for n, end in enumerate(ends) if policy.learns or not end]
        if shown:
            signals = Signals(
                [own[n].number for n in shown],
                [new[n].token for n in shown],
                [own[n].drafted for n in shown],
                look.logits,
                look.likely if look.probs is None else look.probs,
                look.hidden,
                [places[n] for n in shown],
            )
            signals.fetch(policy.reads)
            for n, go in zip(shown, policy.go_on(signals), strict=True):
                ends[n] = ends[n] or not go
        for slot, node, end in zip(own, new, ends, strict=True):
            if end:
                self._send(Pause(slot.number, node.number))
                slot.drafted = 0

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
        self._policy = resources.policy(settings.draft, settings.policy)
        self._runner, self._settings = self._runners[key], message
        if self._policy.needs_hidden:
            self._runner.watch_hidden(True)
        self._lookup = None if guesses is None else resources.build(guesses)

    def _begin(self, message: Begin) -> None:
        number, text = message.slot, message.tokens
        stream = RandomStream(message.seed)
        # Independent of the target's own uniform numbers; coupled noise must be the same.
        stream.uniform = random.Random(f"{message.seed} {message.root} {self._salt}").random
        canopy = Canopy(Node(message.root, text[-1], len(text) - 1, None, told=True))
        sequence = Sequencing(number, list(text), message.sampling, stream)
        self._slots[number] = _Slot(sequence, canopy, message.end)
        self._policy.reset(number)
        if self._lookup is not None:
            self._lookup.open([sequence])
        self._runner.truncate(number, 0)
        if text[:-1]:
            self._runner.prefill([number], [text[:-1]])

    def _commit(self, message: Commit) -> None:
        slot = self._slots[message.slot]
        if message.drafted:
            self._policy.observe(slot.number, message.drafted, message.accepted)
        self._learn(slot, message)
        tip = slot.canopy.tip
        self._keep(slot, slot.canopy.confirm(message.tokens, self._numbers))
        if slot.canopy.tip is not tip:
            slot.drafted = 0

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
        if slot is not None and self._lookup is not None:
            slot.sequence.tokens += message.tokens
            self._lookup.close(slot.sequence)

    def _keep(self, slot: _Slot, places: Sequence[int]) -> None:
        """Of the tree in the cache only these places are kept: they are behind one another now."""
        tree = slot.canopy
        self._runner.keep(slot.number, tree.plain + len(tree.read) - len(places), places)

    @torch.inference_mode()
    def _answer(self, message: Ask) -> None:
        """Where another draft drew the token, of whom there was to learn, the distribution is made
        anew."""
        slot = self._slots[message.slot]
        node = slot.canopy.find(message.node)
        if node.behind is None:
            self._read({slot.number: slot.canopy.chain()}, {})
        self._send(Distribution.of(slot.number, message.node, node.behind))


def _own(states: Tensor, counts: Sequence[int]) -> Tensor:
    """The first so many entries of each row of `states` (rows, width, …), one behind the other."""
    if all(own == states.shape[1] for own in counts):
        return states.flatten(0, 1)
    return torch.cat([row[:own] for row, own in zip(states, counts, strict=True)])


def _rejection(sampling: Sampling) -> bool:
    return not sampling.greedy and sampling.coupling == "rejection"


def _coupled(sampling: Sampling) -> bool:
    return not sampling.greedy and sampling.coupling == "gumbel"
