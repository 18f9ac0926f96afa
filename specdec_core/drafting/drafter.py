"""Who proposes: the interface of a drafter, what it sees of a slot, and what it is built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from specdec_core.base.round_clock import RoundClock
from specdec_core.config import DrafterSettings, LookupSettings, PolicySettings, Sampling, run_time
from specdec_core.drafting.pearl.link import Link, no_link
from specdec_core.drafting.policies.policy import LengthPolicy, build_policy
from specdec_core.tokens.token_tree import TokenTree

if TYPE_CHECKING:
    from specdec_core.drafting.heads.loaded import LoadedHead
    from specdec_core.models.runner import ModelRunner
    from specdec_core.tokens.sampling import RandomStream


@dataclass(slots=True)
class SlotState:
    """What a drafter may know of a slot: its committed tokens and how it samples."""

    slot: int
    tokens: list[int]  # prompt and output so far; never empty
    sampling: Sampling
    random: RandomStream
    room: int = 0  # candidate tokens that may follow each other in the round
    batch: int = 1  # requests that share the round
    # The target's tokens for the next place, where a drafter has it begin the tree.
    target_start: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """What became of a slot's tree."""

    tree: TokenTree
    path: list[int]  # accepted nodes that are in the output, from the root on
    choices: list[int]  # the target's own token behind the text, [0], and behind node i, [i + 1]
    seconds: float  # of drafting and of the target's forward

    @property
    def accepted(self) -> int:
        return len(self.path)


class Drafter:
    """Proposes a token tree for each slot and learns what became of it."""

    target_width = 0  # tokens that the target shall draw to begin each tree with
    shapes: Sequence[Sequence[int]] = ()  # the parents of trees that it grows, whole or cut

    def __init__(self, settings: Any, resources: Resources) -> None:
        """Built from the settings of its kind."""

    @classmethod
    def replayed(cls, settings: Any, recorded: Any) -> Drafter:
        """The drafter as a replay runs it, from the resources that there are in one
        (:class:`specdec_core.drafting.recorded.RecordedResources`): itself, unless it runs a draft
        model."""
        return cls(settings, recorded)

    @classmethod
    def replayed_at_once(cls, settings: Any, recorded: Any) -> Any | None:
        """All rounds that a replay would come to, as a recorded draft makes them, where they are
        known without running the drafter; None elsewhere."""
        return None

    @classmethod
    def check_state(cls, settings: Any, state: dict[str, Any], source: str) -> None:
        """Raises :class:`UserError`, naming `source`, for what is no state of such a drafter."""

    def prepare(self, seconds: float) -> bool:
        """Wait for a part of it that is elsewhere to be ready, so long at most; whether it is.
        Nobody has to: what is not ready proposes nothing. Raises :class:`UserError` where it will
        never be."""
        return True

    def open(self, sequences: Sequence[SlotState]) -> None:
        """Requests enter their slots."""

    def propose(self, sequences: Sequence[SlotState]) -> list[TokenTree]:
        """At most `sequence.room` candidate tokens deep for each slot; maybe none."""
        raise NotImplementedError

    def arrived(self, sequences: Sequence[SlotState], trees: Sequence[TokenTree]) -> None:
        """The target has read the trees. Candidates that have come since may be added, one behind
        each place that it has read: `tree.fed` says how many nodes those are."""

    def observe(self, sequence: SlotState, outcome: Outcome) -> None:
        """The round is committed, and it was not the request's last: `sequence.tokens` now ends in
        the path's tokens and, unless the target begins the trees, one of the target's own."""

    def missed(self, sequence: SlotState) -> None:
        """The same, of a round that another drafter has proposed for."""

    def close(self, sequence: SlotState) -> None:
        """The request leaves its slot, finished or cancelled: `sequence.tokens` is all its text."""

    def state(self) -> dict[str, Any] | None:
        """What it has learned that serves later requests, as JSON can hold it; None: nothing."""
        return None

    def load(self, state: dict[str, Any], source: str = "the state") -> None:
        """Go on from a :meth:`state`. Raises :class:`UserError`, naming `source`, for one that is
        not of this drafter."""

    def learned(self) -> list[dict[str, Any]] | None:
        """What its state says of each drafter that it chooses among, for people; None where there
        is no state."""
        return None


@dataclass(slots=True)
class Found:
    """Candidates from a lookup, best first, and how many of the text's last tokens led there."""

    tree: TokenTree
    match: int = 0


class Lookup(Drafter):
    """Proposes from texts, without a model; also behind text that is not committed yet."""

    def find(self, sequence: SlotState, drafted: Sequence[int], room: int) -> Found:
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
    tokenizer_digest: Callable[[], str] | None = None  # of the vocabulary; None: not known here
    clock: RoundClock = field(default_factory=RoundClock)  # what a round's time goes into
    slots: int = 1
    open_link: Callable[[], Link] = no_link  # to a draft on a device of its own

    def build(self, settings: DrafterSettings) -> Drafter:
        """The drafter that `settings` describe."""
        built: Drafter = run_time(settings)(settings, self)
        return built

    def lookup(self, settings: LookupSettings) -> Lookup:
        """The same where they are a lookup's."""
        lookup = self.build(settings)
        assert isinstance(lookup, Lookup)
        return lookup

    def policy(self, draft: str | None, settings: PolicySettings) -> LengthPolicy:
        """The length policy of a draft model that `settings` describe."""
        return build_policy(settings, partial(self.load_head, draft))
