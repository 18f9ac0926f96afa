"""The draft's side of PEARL: it drafts without waiting for the target's verdicts.

It takes its own candidates for the sequence until the target has confirmed other tokens, and also
drafts after likely alternatives (:mod:`specdec_core.drafting.pearl.tree`). The tokens of a
forward are sent at once. The target's messages are handled before the next forward.

With a lookup a forward drafts several tokens (a cascade). The lookup guesses how the chain
continues, and the draft reads the guesses together with the chain's end. It draws a token at each
guess as long as the guesses equal the tokens drawn. So every token of the chain is drawn from the
draft's own distribution.
"""

from __future__ import annotations

import gc
import math
import random
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, takewhile
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specdec_core.base.errors import UserError
from specdec_core.base.wire import LinkLost, connect
from specdec_core.drafting.drafter import Lookup, Outcome, Resources, SlotState
from specdec_core.drafting.heads.storage import load_pair_head
from specdec_core.drafting.pearl.messages import (
    Begin,
    Commit,
    Compiling,
    Configure,
    Configured,
    Distribution,
    Drafted,
    DraftedToken,
    End,
    RequestDistribution,
    decode,
    encode,
)
from specdec_core.drafting.pearl.tree import DraftTree, Node, Source
from specdec_core.drafting.pearl.windows import Windows
from specdec_core.drafting.warped import places, warped
from specdec_core.models.pair import Pair
from specdec_core.models.runner import Batch, ModelRunner
from specdec_core.tokens.acceptance import Places, rule_of
from specdec_core.tokens.grammar import COMPILERS, Grammar, Grammars, grammars_of
from specdec_core.tokens.sampling import RandomStream, quantile
from specdec_core.tokens.token_tree import ROOT, TokenOrigin, TokenTree

_ALTERNATIVES = 2  # guesses at the target's token in place of a drawn one
_MAX_UNREAD = 16  # tokens of the chain that one forward reads
_MAX_TRIED = 32  # guesses of a lookup that one forward reads
_MAX_CACHED = 96  # nodes of a tree in the cache, with the guesses that are tried
_COMPILING = 0.01  # seconds between two looks for a compiled grammar


@dataclass(slots=True)
class _DraftSlot:
    state: SlotState  # its tokens are those that the target has confirmed
    tree: DraftTree
    end: int
    tried: list[Node] = field(default_factory=list)  # a lookup's guesses in the current forward

    @property
    def number(self) -> int:
        return self.state.slot


class AsynchronousDraft:
    """Drafts for all slots while the target verifies. Grammars are compiled on other threads;
    drafting for a slot begins when its grammar has been compiled.

    `send` reaches the target's side. `salt` makes this draft's random numbers its own. Only the
    drafts of the pair are used.
    """

    def __init__(self, pair: Pair, send: Callable[[Any], None], salt: str = "") -> None:
        self._pair, self._send, self._salt = pair, send, salt
        self._runners: dict[tuple[str, int], ModelRunner] = {}
        self._slots: dict[int, _DraftSlot] = {}
        # By slot, while its grammar is compiled: its beginning, and the messages for it since then.
        self._waiting: dict[int, tuple[Future[Begin], list[Any]]] = {}
        self._numbers, self._forwards = count(1), count()
        self._settings: Configure
        self._runner: ModelRunner
        self._windows: Windows
        self._grammars: Grammars
        self._lookup: Lookup | None = None
        self._configured = False  # the last Configure succeeded

    @property
    def compiling(self) -> bool:
        """Whether a slot waits for its grammar."""
        return bool(self._waiting)

    def handle(self, message: Any) -> None:
        """Act on a message of the target's side."""
        if isinstance(message, Configure):
            self._slots.clear()
            self._waiting.clear()
            try:
                self._configure(message)
                self._configured = True
                self._send(Configured(self._runner.max_length))
            except UserError as error:
                self._configured = False
                self._send(Configured(0, str(error)))
        elif self._configured:
            self._resume()
            self._handle_slot(message)

    @torch.inference_mode()
    def _handle_slot(self, message: Any) -> None:
        match message:
            case Begin():
                self._take(message)
            case Commit() | RequestDistribution() if message.slot in self._waiting:
                self._waiting[message.slot][1].append(message)
            case Commit():
                self._commit(message)
            case RequestDistribution():
                self._send_distribution(message)
            case End():
                self._end(message)

    @torch.inference_mode()
    def draft(self) -> bool:
        """Extend the trees of all slots by one forward. Returns whether there was any to extend."""
        self._resume()
        rows = []
        for slot in self._slots.values():
            if nodes := self._pick(slot):
                slot.tried = self._guesses(slot, nodes)
                rows.append((slot, nodes + slot.tried))
        if rows:
            self._read(rows)
        return bool(rows)

    def _pick(self, slot: _DraftSlot) -> list[Node]:
        """The nodes of a tree to read: the chain's end first."""
        tree, settings, end = slot.tree, self._settings, self._end_of(slot)
        chain: list[Node] = []
        if tree.tip.position + 1 < end and not self._final(tree):
            chain = tree.unread()[:_MAX_UNREAD]
        final = settings.eos_token_ids
        return chain + tree.likely(settings.width - 1, settings.least, end, final)

    def _end_of(self, slot: _DraftSlot) -> int:
        """The position before which tokens may be drafted now."""
        return min(slot.tree.root.position + 1 + self._settings.ahead, slot.end)

    def _guesses(self, slot: _DraftSlot, nodes: Sequence[Node]) -> list[Node]:
        """New nodes: what a lookup guesses after the chain's end, if `nodes` have that."""
        tree = slot.tree
        tried: list[Node] = []
        # The forward itself adds a token after the guesses.
        room = self._end_of(slot) - tree.tip.position - 2
        if self._lookup is None or room <= 0 or tree.tip not in nodes:
            return tried
        guesses = self._lookup.find(slot.state, tree.drawn(), room).tree
        most = min(_MAX_TRIED, _MAX_CACHED - len(tree.read) - len(nodes))
        for token, parent in zip(guesses.tokens[: max(most, 0)], guesses.parents, strict=False):
            before = tree.tip if parent == ROOT else tried[parent]
            node = Node(next(self._numbers), token, before.position + 1, before)
            before.guesses.append(node)
            tried.append(node)
        return tried

    def _final(self, tree: DraftTree) -> bool:
        """Whether the chain ends the sequence. A final token that the target has confirmed does
        not."""
        return tree.tip is not tree.root and tree.tip.token in self._settings.eos_token_ids

    def _read(self, rows: Sequence[tuple[_DraftSlot, list[Node]]]) -> None:
        """Feed the draft nodes of slots, the guesses that are tried last. Add what it predicts to
        the trees, and send it."""
        began = perf_counter()
        ends = [slot.tree.tip.position for slot, _ in rows]
        for slot, nodes in rows:
            slot.tree.enter(nodes)
        states = [slot.state for slot, _ in rows]
        feed = [[node.token for node in nodes] for _, nodes in rows]
        parents = [slot.tree.parents for slot, _ in rows]
        output = self._runner.forward(Batch([state.slot for state in states], feed, parents))
        output = warped(
            output, states, lambda n: [_drafted(states[n], node) for node in rows[n][1]]
        )
        read = [(slot, node) for slot, nodes in rows for node in nodes]
        positions = [node.position + 1 for _, node in read]
        at = places([slot.state for slot, _ in read], positions, output)
        drafted = self._grow(read, at, output.hidden)
        ended = perf_counter()
        for (slot, nodes), end in zip(rows, ends, strict=True):
            number, candidates = slot.number, slot.tree.tip.position - end
            self._send(Drafted(number, drafted[number], len(nodes), candidates, began, ended))
            if slot.tried:
                self._keep(slot, slot.tree.settle(slot.tried))
                slot.tried = []
        self._windows.grow()

    def _grow(
        self, places: Sequence[tuple[_DraftSlot, Node]], at: Places, hidden: Tensor | None
    ) -> dict[int, list[DraftedToken]]:
        """Add to the node at each place the token drawn there and alternatives to it; to guesses
        that are tried only if the chain reaches them. Returns the new tokens by slot."""
        tried = {node for slot in self._slots.values() for node in slot.tried}
        forward = next(self._forwards)
        alternatives = _ALTERNATIVES if self._settings.width > 1 else 0
        confidences = at.confidences()
        best = confidences.topk(min(alternatives + 1, confidences.shape[-1]), dim=-1)
        likely = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        drawn = self._draw(places, at, likely)
        drafted: dict[int, list[DraftedToken]] = {slot.number: [] for slot, _ in places}
        for n, (slot, node) in enumerate(places):
            new, tree = drafted[slot.number], slot.tree
            if node in tried and (node is not tree.tip or self._final(tree)):
                continue
            if node.parent is not None and not node.sent:
                new.append((node.number, node.parent.number, node.token, False, None))
                node.sent = True
            if node.position < tree.root.position:
                continue  # its continuation is confirmed already
            token, chance = drawn[n]
            first, others = self._children(node, token, chance, *likely[n])
            tree.grow(node, first, others[:alternatives])
            # Copies: the draft's next forward may overwrite its logits.
            rows = (None if rows is None else rows[n].clone() for rows in (at.probs, hidden))
            node.source = Source(forward, at.logits[n].clone(), *rows)
            sent_chance = chance if rule_of(slot.state.sampling).carries_q else None
            new.append((first.number, node.number, token, True, sent_chance))
            first.sent = True
        return drafted

    def _draw(
        self,
        places: Sequence[tuple[_DraftSlot, Node]],
        at: Places,
        likely: Sequence[tuple[list[int], list[float]]],
    ) -> list[tuple[int, float]]:
        """The token drawn at each place and its probability: the most likely token, or for
        rejection sampling a random one."""
        drawn = [(tokens[0], values[0]) for tokens, values in likely]
        states = [slot.state for slot, _ in places]
        chosen = [n for n, state in enumerate(states) if rule_of(state.sampling).carries_q]
        if chosen:
            rows = at.sampled[chosen]
            tokens = quantile(rows, [states[n].random.uniform() for n in chosen])
            chances = rows.gather(1, tokens[:, None])[:, 0]
            for n, token, chance in zip(chosen, tokens.tolist(), chances.tolist(), strict=True):
                drawn[n] = token, chance
        return drawn

    def _children(
        self,
        node: Node,
        token: int,
        chance: float,
        tokens: Sequence[int],
        confidences: Sequence[float],
    ) -> tuple[Node, list[Node]]:
        """The child of `node` for the `token` drawn with probability `chance`, and the likely
        alternatives among `tokens`, the best by `confidences`."""
        # As if the target accepted with the draft's confidence, and else drew from the rest.
        sure = min(confidences[0], 1.0)
        rest = (1 - sure) / max(1 - chance, 1e-6)
        others = [
            self._child(node, guess, value * rest)
            for guess, value in zip(tokens, confidences, strict=True)
            if guess != token and value * rest > self._settings.least
        ]
        return self._child(node, token, sure), others

    def _child(self, parent: Node, token: int, chance: float) -> Node:
        """The child with that token: one that is being tried, or a new one."""
        node = parent.child(token)
        if node is None:
            node = Node(next(self._numbers), token, parent.position + 1, parent)
        node.score = parent.score + math.log(max(chance, 1e-9))
        return node

    def _configure(self, message: Configure) -> None:
        settings = message.drafter
        key = self._pair.draft_name(settings.draft), message.slots
        if key not in self._runners:
            length = min(self._pair.max_length, self._pair.follows(key[0]))
            self._runners[key] = self._pair.open_runner(*key, max_length=length)
        for runner in self._runners.values():
            runner.watch_hidden(False)
        self._runner, self._settings = self._runners[key], message
        resources = Resources(
            lambda name: self._runner,
            partial(load_pair_head, self._pair),
            message.vocab_size,
            message.eos_token_ids,
            slots=message.slots,
        )
        tokens = message.vocab_size, message.eos_token_ids
        self._grammars = grammars_of(self._pair.tokenizer, *tokens)
        policy = resources.policy(settings.draft, settings.policy)
        self._windows = Windows(policy, message.eos_token_ids, self._send)
        guesses = settings.guesses
        self._lookup = None if guesses is None else resources.lookup(guesses)

    def _take(self, message: Begin) -> None:
        """Begin a slot's sequence, at once or when its grammar is compiled."""
        self._waiting.pop(message.slot, None)
        grammar = None if message.rules is None else message.rules.grammar
        if grammar is None or grammar.program is not None:
            self._begin(message)
        else:
            self._end(End(message.slot, []))  # drop the slot's earlier sequence
            self._waiting[message.slot] = COMPILERS.submit(self._compiled, message, grammar), []
            self._send(Compiling(message.slot, message.root))

    def _compiled(self, message: Begin, grammar: Grammar) -> Begin:
        assert message.rules is not None  # the grammar is one of them
        rules = replace(message.rules, grammar=self._grammars.prepared(grammar))
        return message._replace(rules=rules)

    def _resume(self) -> None:
        """Begin the sequences in slots that waited for a grammar which is compiled by now."""
        for number, (begin, messages) in list(self._waiting.items()):
            if begin.done():
                del self._waiting[number]
                for message in (begin.result(), *messages):
                    self._handle_slot(message)

    def _begin(self, message: Begin) -> None:
        number, text = message.slot, message.tokens
        if len(text) > self._runner.max_length:
            self._end(End(number, []))  # drop the slot's earlier sequence
            return
        stream = RandomStream(message.seed, self._settings.vocab_size)
        # Independent of the target's own uniform numbers; coupled noise must be the same.
        stream.uniform = random.Random(f"{message.seed} {message.root} {self._salt}").random
        tree = DraftTree(Node(message.root, text[-1], len(text) - 1, None, sent=True))
        warper = None if message.rules is None else message.rules.warper(self._grammars)
        state = SlotState(number, list(text), message.sampling, stream, warper=warper)
        # The last candidate is not read.
        end = min(message.end, self._runner.max_length + 1)
        self._slots[number] = _DraftSlot(state, tree, end)
        self._windows.begin(number, tree.root)
        if self._lookup is not None:
            self._lookup.open([state])
        self._runner.truncate(number, 0)
        if text[:-1]:
            self._runner.prefill([number], [text[:-1]])

    def _commit(self, message: Commit) -> None:
        slot, tokens = self._slots.get(message.slot), message.tokens
        if slot is None:
            return
        self._learn(slot, message)
        if len(slot.state.tokens) > self._runner.max_length:
            self._end(End(message.slot, []))
            return
        agreed = slot.tree.agreed(tokens)
        self._keep(slot, slot.tree.confirm(tokens, self._numbers))
        self._windows.confirm(slot.number, slot.tree.root, agreed, agreed < len(tokens))
        self._windows.grow()

    def _learn(self, slot: _DraftSlot, message: Commit) -> None:
        """Report the chain's outcome to the lookup."""
        text, added = slot.state.tokens, message.accepted + 1
        text += message.tokens[:added]
        if self._lookup is not None and message.drafted:
            read = len(message.choices) - 1
            tree = TokenTree.chain(slot.tree.drawn()[: message.drafted][:read], TokenOrigin.DRAFT)
            path = list(range(min(message.accepted, len(tree))))
            self._lookup.observe(slot.state, Outcome(tree, path, message.choices, 0.0))
        text += message.tokens[added:]

    def _end(self, message: End) -> None:
        self._waiting.pop(message.slot, None)
        slot = self._slots.pop(message.slot, None)
        if slot is None:
            return
        self._windows.end(slot.number)
        if self._lookup is not None:
            slot.state.tokens += message.tokens
            self._lookup.close(slot.state)

    def _keep(self, slot: _DraftSlot, places: Sequence[int]) -> None:
        """Keep only these places of the tree in the cache, moved together."""
        tree = slot.tree
        self._runner.keep(slot.number, tree.plain + len(tree.read) - len(places), places)

    def _send_distribution(self, message: RequestDistribution) -> None:
        """Send what a token was drawn from; computed anew where an earlier draft drew it."""
        slot = self._slots[message.slot]
        node = slot.tree.find(message.node)
        assert node is not None  # the rejected token follows it
        if node.source is None:
            self._read([(slot, slot.tree.unread())])
        assert node.source is not None
        assert node.source.probs is not None  # only rejection sampling requests it
        self._send(Distribution.of(slot.number, message.node, node.source.probs))


def serve(host: str, port: int, key: bytes, pair: Pair) -> None:
    """Draft for the engine at that address until it closes the connection. Raises
    :class:`LinkLost` where it cannot be reached."""
    with closing(connect(host, port, key)) as wire, suppress(LinkLost):
        draft = AsynchronousDraft(
            pair, lambda message: wire.send(encode(message)), salt=secrets.token_hex(8)
        )
        # What is loaded by now stays; collecting it again would keep the target waiting.
        gc.collect()
        gc.freeze()
        busy = False
        while True:
            idle = _COMPILING if draft.compiling else None
            for message in wire.receive(0.0 if busy else idle):
                draft.handle(decode(message))
            busy = draft.draft()


def _drafted(state: SlotState, node: Node) -> list[int]:
    """The tokens after the confirmed sequence on the way to `node`, its own included; none in the
    sequence itself, where nothing is drawn any more."""
    beyond = takewhile(lambda up: up.position >= len(state.tokens), node.up())
    return [up.token for up in beyond][::-1]
