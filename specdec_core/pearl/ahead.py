"""The draft's side: draft on and on, until told that the text is another.

The draft takes its own candidates for the text until the target says what the text is. Whatever it
drafts it sends at once; after every forward it looks whether a correction has come, and what that
makes useless is not drafted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specdec_core.drafters import Drafter, Resources, Sequencing, build_drafter
from specdec_core.pair import Pair
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
from specdec_core.runner import ModelRunner
from specdec_core.sampling import RandomStream, distributions
from specdec_core.token_tree import TokenTree


@dataclass(slots=True)
class _Slot:
    sequence: Sequencing
    text: list[int]  # what the target has confirmed, and the draft's own tokens behind it
    confirmed: int
    end: int
    serial: int
    probs: dict[int, Tensor] = field(default_factory=dict)  # by position of the text


class Ahead:
    """Drafts ahead of the target for all slots.

    `send` reaches the target's side and `mail` says what has come from there. `salt` makes this
    draft's random numbers its own. Of the pair only the drafts are needed.
    """

    def __init__(
        self,
        pair: Pair,
        send: Callable[[Any], None],
        mail: Callable[[], Iterable[Any]],
        salt: str = "",
    ) -> None:
        self._pair, self._send, self._mail, self._salt = pair, send, mail, salt
        self._runners: dict[tuple[str, int], ModelRunner] = {}
        self._slots: dict[int, _Slot] = {}
        self._ahead = 0
        self._eos: frozenset[int] = frozenset()
        # By slot that the drafter drafts for now, how much of its tree has been seen.
        self._drafting: dict[int, int] = {}
        self._since = 0.0
        self.drafter: Drafter | None = None

    def handle(self, message: Any) -> bool:
        """Heed a message. Whether what is being drafted now has become useless."""
        match message:
            case Configure():
                self._configure(message)
                return True
            case Begin():
                self._begin(message)
                return True
            case Commit():
                return self._commit(message)
            case Ask():
                probs = self._distribution(message.slot, message.position)
                self._send(Distribution.of(message.slot, message.position, probs))
            case End():
                return self._slots.pop(message.slot, None) is not None
        return False

    @property
    def busy(self) -> bool:
        """Whether there is something to draft."""
        return any(self._room(slot) > 0 for slot in self._slots.values())

    def draft(self) -> None:
        """Draft for every slot with room until the policy would stop, the room is used up, or a
        message makes it useless."""
        own = [slot for slot in self._slots.values() if self._room(slot) > 0]
        if not own:
            return
        for slot in own:
            slot.sequence.tokens = list(slot.text)
            slot.sequence.room, slot.sequence.batch = self._room(slot), len(own)
        self._drafting = {slot.sequence.slot: 0 for slot in own}
        self._since = perf_counter()
        self.drafter.propose([slot.sequence for slot in own])
        for number in self._drafting:
            self._send(Pause(number, self._slots[number].serial))

    def _room(self, slot: _Slot) -> int:
        if len(slot.text) > slot.confirmed and slot.text[-1] in self._eos:
            return 0
        return min(slot.confirmed + self._ahead, slot.end) - len(slot.text)

    def _heard(self, sequences: Sequence[Sequencing], trees: Sequence[TokenTree]) -> bool:
        """Send what the drafter has drafted since the last call; whether it shall go on."""
        now = perf_counter()
        for sequence, tree in zip(sequences, trees, strict=True):
            seen = self._drafting[sequence.slot]
            if len(tree) == seen:
                continue
            slot = self._slots[sequence.slot]
            start = len(slot.text)
            tokens, probs = tree.tokens[seen:], tree.draft_probs[seen:]
            chances = None
            if not sequence.sampling.greedy:
                slot.probs.update(zip(range(start, start + len(tokens)), probs, strict=True))
                if sequence.sampling.coupling == "rejection":
                    chances = [float(q[token]) for token, q in zip(tokens, probs, strict=True)]
            slot.text += tokens
            self._drafting[sequence.slot] = len(tree)
            self._send(
                Drafted(sequence.slot, slot.serial, start, tokens, chances, 1, self._since, now)
            )
        useless = [self.handle(message) for message in self._mail()]
        self._since = perf_counter()
        if any(useless):
            self._drafting = {}
            return False
        return True

    def _configure(self, message: Configure) -> None:
        def runner(name: str | None) -> ModelRunner:
            key = self._pair.draft_name(name), message.slots
            if key not in self._runners:
                self._runners[key] = self._pair.open_runner(*key)
            return self._runners[key]

        for own in self._runners.values():
            own.watch_hidden(False)
        resources = Resources(
            runner,
            self._pair.load_head,
            message.vocab_size,
            message.eos_token_ids,
            slots=message.slots,
            heard=self._heard,
        )
        self.drafter = build_drafter(message.drafter, resources)
        self._runner = self.drafter.runner
        self._ahead, self._eos = message.ahead, message.eos_token_ids
        self._slots.clear()

    def _begin(self, message: Begin) -> None:
        runner, number = self._runner, message.slot
        runner.truncate(number, 0)
        stream = RandomStream(message.seed)
        # Independent of the target's own uniform numbers; coupled noise must be the same.
        stream.uniform = random.Random(f"{message.seed} {message.serial} {self._salt}").random
        sequence = Sequencing(number, list(message.tokens), message.sampling, stream)
        text = list(message.tokens)
        self._slots[number] = _Slot(sequence, text, len(text), message.end, message.serial)
        self.drafter.open([sequence])

    def _commit(self, message: Commit) -> bool:
        slot, length = self._slots[message.slot], message.length
        slot.serial, slot.confirmed = message.serial, length
        slot.probs = {place: q for place, q in slot.probs.items() if place >= length}
        policy = getattr(self.drafter, "policy", None)
        if policy is not None and message.drafted:
            policy.observe(message.slot, message.drafted, message.accepted)
        if message.own is None:
            return False
        slot.confirmed += 1
        agreed = message.accepted == message.drafted
        if agreed and len(slot.text) > length and slot.text[length] == message.own:
            return False
        slot.text[length:] = [message.own]
        slot.probs.clear()
        self._runner.truncate(message.slot, min(self._runner.lengths[message.slot], length))
        return True

    @torch.inference_mode()
    def _distribution(self, number: int, position: int) -> Tensor:
        """What the token at a position is drawn from, (vocabulary,); made anew where another draft
        drew it, of whom there was to learn."""
        slot, runner = self._slots[number], self._runner
        if position in slot.probs:
            return slot.probs[position]
        length = runner.lengths[number]
        runner.truncate(number, 0)
        runner.prefill([number], [slot.text[: position - 1]])
        logits = runner.forward([number], [[slot.text[position - 1]]])
        runner.truncate(number, min(length, position - 1))
        return distributions(logits, [slot.sequence.sampling])[0, -1]
