"""What each step of the engine does, decided on numbers alone.

Requests wait, then run in a slot. A running request first has its prompt read by the target, whose
end yields the first token, and then decodes. A step feeds the target so many tokens: each decoding
request its candidates, and what is left of the step's budget are chunks of texts that are still
being read. So a long prompt delays nobody by more than a step.

The engine and the simulation of load run the same scheduler: it knows neither models nor time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

STEP_TOKENS = 256  # tokens that a step feeds
BLOCK = 64  # tokens; the cache is counted in blocks of so many

# The slot of a request, by its name, among the free ones; and how many tokens of it are read.
Place = Callable[[str, Sequence[int]], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine may use: `slots` requests at a time, `step_tokens` tokens a step, and
    `cache_tokens` tokens in the cache (None: what the slots hold), `ahead` of which each keeps for
    a round's candidates.

    With `share_prefixes` a prompt that begins like a text which a slot still holds is read from
    there on. That is exact but for rounding: in reduced precision a near-tie may then fall
    otherwise than after reading the whole prompt.
    """

    slots: int
    step_tokens: int = STEP_TOKENS
    cache_tokens: int | None = None
    share_prefixes: bool = False
    ahead: int = BLOCK

    def verifying(self, candidates: int) -> Limits:
        """The same where a round has at most so many candidates. A block is kept for fewer, too."""
        return replace(self, ahead=max(candidates, BLOCK))

    def blocks_of(self, tokens: int) -> int:
        """Blocks that a text of `tokens` tokens needs, with a round's candidates."""
        return -(-(tokens + self.ahead) // BLOCK)

    @property
    def blocks(self) -> int | None:
        """Whole blocks of the cache."""
        return None if self.cache_tokens is None else self.cache_tokens // BLOCK

    @property
    def most(self) -> int | None:
        """Tokens, prompt and output, that a request may have in the cache; None: any number."""
        return None if self.blocks is None else max(self.blocks * BLOCK - self.ahead, 0)

    def holds(self, tokens: int) -> bool:
        """Whether a request of `tokens` tokens, prompt and output, can ever run."""
        return self.most is None or tokens <= self.most


@dataclass(slots=True, eq=False)
class Scheduled:
    """A request: its text has `tokens` tokens, of which the target holds `read`. It has `begun`
    when it has had its first round."""

    name: str
    tokens: int
    read: int = 0
    slot: int = -1
    blocks: int = 0  # reserved
    resting: bool = False  # preempted: it keeps its slot, and none of the cache
    begun: bool = False

    @property
    def unread(self) -> int:
        """Tokens to read apart from those of rounds with candidates: all of the prompt. The last
        token of a text that has grown is read with the candidates, also by who was preempted."""
        return max(self.tokens - self.begun - self.read, 0)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Of running requests, by slot: those that decode, those of which so many tokens are read, and
    what changed before: those that were preempted and those that entered. Who decodes while read
    has the prompt read to its end: the first round, without candidates."""

    decoding: list[int] = field(default_factory=list)
    reading: dict[int, int] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)
    entering: dict[int, str] = field(default_factory=dict)

    @property
    def running(self) -> int:
        """Requests that take part."""
        return len({*self.decoding, *self.reading})


class Scheduler:
    """Requests by name. A step begins with :meth:`plan`; after it the caller reports with
    :meth:`grew` and :meth:`leave` what became of the requests.

    First come, first served: nobody enters before one who waits longer. Of the texts being read,
    the oldest gets at least half of what is left of a step's budget and the shortest the rest, so
    that neither a short prompt waits for long ones nor a long one for ever. Where the oldest can be
    read to its end, others come along whole or not at all: a part would hold back its first token
    and bring another's hardly nearer. When the cache is full, the youngest request is preempted: it
    leaves the cache, keeps its slot and its state, and its text is read again as soon as there is
    room.

    `place` chooses the slot of a request, and says how much of its text is there already; unset, it
    is the first one, and nothing.
    """

    def __init__(self, limits: Limits, place: Place | None = None) -> None:
        self.limits = limits
        self._place: Place = place or (lambda name, free: (free[0], 0))
        self.waiting: deque[Scheduled] = deque()
        self.running: dict[str, Scheduled] = {}  # in the order in which they entered
        self.preemptions = 0
        self._free = list(range(limits.slots))
        self._candidates = 0.0  # of a decoding request, in the last step
        self._all_decode = False  # those that run, in the last step

    @property
    def idle(self) -> bool:
        """Whether no request is running or waiting."""
        return not self.running and not self.waiting

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return not self._free

    @property
    def settled(self) -> bool:
        """Whether steps decode all running requests and do nothing else, until a request comes or
        leaves, or those that run need more blocks than there are."""
        if not self._all_decode or not self.waiting or self.full:
            return self._all_decode and bool(self.running)
        limit = self.limits.blocks
        return (
            limit is not None
            and self.blocks + self.limits.blocks_of(self.waiting[0].tokens) > limit
        )

    @property
    def blocks(self) -> int:
        """Blocks of the cache that are reserved."""
        return sum(request.blocks for request in self.running.values())

    @property
    def held(self) -> int:
        """Tokens of running requests that the target has read."""
        return sum(request.read for request in self.running.values())

    @property
    def room(self) -> int | None:
        """Tokens of the cache that nobody has reserved; None without a limit."""
        limit = self.limits.blocks
        return None if limit is None else max(limit - self.blocks, 0) * BLOCK

    def add(self, name: str, tokens: int) -> None:
        """A request with a prompt of `tokens` tokens comes."""
        self.waiting.append(Scheduled(name, tokens))

    def leave(self, name: str) -> None:
        """A request has finished or was cancelled; unknown ones are ignored."""
        request = self.running.pop(name, None)
        if request is None:
            self.waiting = deque(other for other in self.waiting if other.name != name)
        else:
            self._free.append(request.slot)
            self._free.sort()

    def grew(self, name: str, tokens: int) -> None:
        """After a round the text of `name` has `tokens` tokens, of which the target holds all but
        the last one."""
        request = self.running[name]
        request.tokens, request.read, request.begun = tokens, tokens - 1, True

    def fed(self, candidates: Sequence[int]) -> None:
        """The requests with rounds of the step that were not their first had so many candidates
        each."""
        if candidates:
            self._candidates = sum(candidates) / len(candidates)

    def plan(self) -> StepPlan:
        """What the next step does. Texts are taken to be read as it says."""
        preempted = self.reserve()
        entering = self._admit()
        decoding: list[Scheduled] = []
        unread: list[Scheduled] = []
        for request in self.running.values():
            if not request.resting:
                read = request.read >= request.tokens - request.begun
                (decoding if read else unread).append(request)
        chunks = self._chunks(unread, len(decoding))
        reading = {slot: count for slot, count in chunks.items() if count}
        for request in unread:
            request.read += chunks.get(request.slot, 0)
            if not request.unread and not request.begun:
                decoding.append(request)
        self._all_decode = len(decoding) == len(self.running)
        slots = sorted(request.slot for request in decoding)
        return StepPlan(slots, reading, preempted, entering)

    def reserve(self) -> list[int]:
        """Reserve room for a round of everybody, the oldest first; who gets none is preempted, or
        goes on resting. Returns the slots of those preempted."""
        limit = self.limits.blocks
        if limit is None:
            return []
        requests = list(self.running.values())
        wanted = [self.limits.blocks_of(request.tokens) for request in requests]
        if sum(wanted) <= limit:
            for request, needed in zip(requests, wanted, strict=True):
                request.blocks, request.resting = needed, False
            return []
        preempted: list[int] = []
        for place, request in enumerate(requests):
            if request.resting and any(other.resting for other in requests[:place]):
                continue  # the older one comes first
            needed = wanted[place]
            if request.resting and self.blocks + needed > limit:
                continue  # it never displaces another
            for other in reversed(requests[place + 1 :]):
                if self.blocks - request.blocks + needed <= limit:
                    break
                if not other.resting:
                    self._preempt(other)
                    preempted.append(other.slot)
            if self.blocks - request.blocks + needed <= limit:
                request.blocks, request.resting = needed, False
            elif not request.resting:
                self._preempt(request)
                preempted.append(request.slot)
        return preempted

    def _preempt(self, request: Scheduled) -> None:
        request.blocks, request.read, request.resting = 0, 0, True
        self.preemptions += 1

    def _admit(self) -> dict[int, str]:
        """Waiting requests enter free slots while the cache has room; none while another rests."""
        entering: dict[int, str] = {}
        limit = self.limits.blocks
        while self.waiting and self._free:
            request = self.waiting[0]
            if limit is not None:
                request.blocks = self.limits.blocks_of(request.tokens)
                resting = any(other.resting for other in self.running.values())
                if resting or self.blocks + request.blocks > limit:
                    break
            self.waiting.popleft()
            request.slot, request.read = self._place(request.name, self._free)
            self._free.remove(request.slot)
            self.running[request.name] = request
            entering[request.slot] = request.name
        return entering

    def _chunks(self, unread: Collection[Scheduled], decoding: int) -> dict[int, int]:
        """Tokens to read of each of these texts, the oldest of which comes first, by slot."""
        if self.limits.slots == 1:  # nobody else is delayed
            return {request.slot: request.unread for request in unread}
        if not unread:
            return {}
        budget = self.limits.step_tokens
        left = max(round(budget - decoding * (1 + self._candidates)), budget // 4, 1)
        oldest, *others = unread
        ends = oldest.unread <= left
        first = oldest.unread if ends else -(-left // 2)
        left -= first
        chunks: dict[int, int] = {}
        for request in sorted(others, key=lambda other: other.unread):
            if ends and request.unread > left:
                break
            chunks[request.slot] = min(request.unread, left)
            left -= chunks[request.slot]
        chunks[oldest.slot] = first if ends else first + left
        return chunks
