"""The interface of a drafter, the state of a slot, and the resources to build drafters from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specdec_core.base.round_clock import RoundClock
from specdec_core.config import DrafterSettings, LookupSettings, PolicySettings, Sampling, run_time
from specdec_core.drafting.policies.policy import LengthPolicy, build_policy
from specdec_core.drafting.states import DrafterMemory
from specdec_core.tokens.token_tree import TokenTree

if TYPE_CHECKING:
    from specdec_core.drafting.heads.loaded import LoadedHead
    from specdec_core.models.runner import ModelRunner
    from specdec_core.tokens.sampling import RandomStream
    from specdec_core.tokens.text_warper import TextWarper


@dataclass(slots=True)
class SlotState:
    """What a drafter sees of a slot: its committed tokens and how it samples."""

    slot: int
    tokens: list[int]  # prompt and output so far; never empty
    sampling: Sampling
    random: RandomStream
    room: int = 0  # depth that a tree may have in the round
    speculate: int | None = None  # the most candidates of a round, where the request says so
    batch: int = 1  # requests that share the round
    warper: TextWarper | None = None  # sampling rules that depend on the sequence


@dataclass(slots=True)
class Outcome:
    """The verdict on a slot's tree."""

    tree: TokenTree
    path: list[int]  # accepted nodes that are in the output, from the root on
    choices: list[int]  # the target's own token after the sequence, [0], and after node i, [i + 1]
    seconds: float  # of drafting and of the target's forward

    @property
    def accepted(self) -> int:
        return len(self.path)


class Drafter:
    """Proposes a token tree for each slot and learns from its outcome."""

    # The parents of trees that the target is fed, whole or cut. Their first node is the sequence's
    # last token, unless the target has read that.
    shapes: Sequence[Sequence[int]] = ()
    memory: DrafterMemory | None = None  # what is kept for later requests; None: nothing
    parts: Sequence[Drafter] = ()  # the drafters that it is made of; they see the same requests

    def __init__(self, settings: Any, resources: Resources) -> None:
        """Built from the settings of its kind."""

    @classmethod
    def recorded_rounds(cls, settings: Any, recorded: Any) -> Any | None:
        """Its rounds from all places of a recording, where they depend on no earlier round, as
        :class:`specdec_core.drafting.recorded.KnownRounds` from its `RecordedResources`. None for
        other drafters: their own code is replayed."""
        return None

    def prepare(self, seconds: float) -> bool:
        """Wait at most `seconds` for a part in another process; returns whether it is ready. This
        is optional: a part that is not ready proposes nothing. Raises :class:`UserError` where it
        cannot become ready."""
        until = perf_counter() + seconds
        return all([part.prepare(max(until - perf_counter(), 0.0)) for part in self.parts])

    def open(self, sequences: Sequence[SlotState]) -> None:
        """Requests enter their slots."""
        for part in self.parts:
            part.open(sequences)

    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        """A tree for each slot, at most `sequence.room` tokens deep; it may be empty. The target
        has read all of each sequence, but for its last token at most."""
        raise NotImplementedError

    def arrived(self, sequences: Sequence[SlotState], trees: Sequence[TokenTree]) -> None:
        """The target has read the trees; `tree.fed` is set to the number of nodes.
        Candidates that have arrived since may be added after nodes that it has read."""

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        """The round is committed and the request continues: `sequence.tokens` now ends in the
        path's tokens and one of the target's own; without that after a node that the target has not
        read."""
        for part in self.parts:
            part.observe(sequence, outcome)

    def missed(self, sequence: SlotState) -> None:
        """The same for a round in which this drafter did not propose: another one did, or none, as
        in a request's first round."""
        for part in self.parts:
            part.missed(sequence)

    def close(self, sequence: SlotState) -> None:
        """The request leaves its slot, finished or cancelled. `sequence.tokens` is all its
        sequence."""
        for part in self.parts:
            part.close(sequence)


@dataclass(slots=True)
class LookupResult:
    """Candidates from a lookup, the best first, and how many of the sequence's last tokens
    matched."""

    tree: TokenTree
    match: int = 0


class Lookup(Drafter):
    """Proposes from sequences, without a model; also after sequence that is not committed yet."""

    def find(self, sequence: SlotState, drafted: Sequence[int], room: int) -> LookupResult:
        """What may follow `sequence.tokens` and then `drafted`, at most `room` tokens deep. All
        nodes are deterministic proposals."""
        raise NotImplementedError

    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        return [self.find(s, (), s.room).tree if s.room > 0 else TokenTree() for s in sequences]


@dataclass(frozen=True)
class Resources:
    """What drafters are built from."""

    draft_runner: Callable[[str | None], ModelRunner]  # by the draft's name; None: the first
    load_head: Callable[[str | None, str], LoadedHead]  # by the draft's name and the head's
    vocab_size: int
    eos_token_ids: frozenset[int]
    clock: RoundClock = field(default_factory=RoundClock)  # measures a round
    slots: int = 1
    open_link: Callable[[], Any] | None = None  # to a draft on another device

    def build(self, settings: DrafterSettings) -> Drafter:
        """The drafter that `settings` describe."""
        built: Drafter = run_time(settings)(settings, self)
        return built

    def lookup(self, settings: LookupSettings) -> Lookup:
        """The lookup that `settings` describe."""
        lookup = self.build(settings)
        assert isinstance(lookup, Lookup)
        return lookup

    def policy(self, draft: str | None, settings: PolicySettings) -> LengthPolicy:
        """The length policy of a draft model that `settings` describe. The model's runner returns
        hidden states where the policy asks for them."""
        policy = build_policy(settings, partial(self.load_head, draft))
        if policy.needs_hidden:
            self.draft_runner(draft).watch_hidden(True)
        return policy

    def recorded_chain(self, draft: str | None) -> Any | None:
        """A recording of the draft model's chains, as the `ChainModel` of
        :mod:`specdec_core.drafting.chain`; None where the draft model runs."""
        return None
