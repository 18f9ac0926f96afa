"""What each step of the engine does, decided on numbers alone.

Requests wait, then run in a slot. A running request first prefills; the end of its prompt yields
its first token, and from then on it decodes. A step has a budget of tokens. Each decoding request
gets its candidates; the rest of the budget goes to chunks of prefilling requests. So a long prompt
delays no other request by more than one step.

The engine and the simulation of load run the same scheduler: it knows neither models nor time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

STEP_TOKENS = 256  # tokens that a step feeds
BLOCK = 64  # tokens of a block, in which the cache is counted

# Chooses one of the free slots for the request of that name; also returns the number of its tokens
# that the cache holds already.
Place = Callable[[str, Sequence[int]], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine may use: `slots` requests at a time, `step_tokens` tokens a step, and
    `cache_tokens` tokens in the cache (None: what the slots hold). Each request reserves `ahead` of
    these for a round's candidates.

    With `share_prefixes` a prompt that begins like a sequence which a slot still holds is prefilled
    from there on. That is exact but for rounding: in reduced precision a near-tie may be decided
    differently than after prefilling the whole prompt.
    """

    slots: int
    step_tokens: int = STEP_TOKENS
    cache_tokens: int | None = None
    share_prefixes: bool = False
    ahead: int = BLOCK

    def verifying(self, candidates: int) -> Limits:
        """The same where a round has at most `candidates`. At least a block is reserved for
        them."""
        return replace(self, ahead=max(candidates, BLOCK))

    def blocks_of(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` tokens needs, with a round's candidates."""
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
    """A request with a sequence of `tokens` tokens. The target's cache holds `read` of them. It has
    `begun` when it has had its first round."""

    name: str
    tokens: int
    read: int = 0
    slot: int = -1
    blocks: int = 0  # reserved
    resting: bool = False  # preempted: it keeps its slot, and nothing in the cache
    begun: bool = False

    @property
    def unread(self) -> int:
        """Tokens to prefill: of a request that has not begun, its prompt; of one that resumes after
        preemption, its sequence but for the last token, which the next round feeds."""
        return max(self.tokens - self.begun - self.read, 0)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step does with running requests, by slot.

    `decoding` slots have a round. `reading` has the number of tokens that each prefilling slot is
    fed. A slot in both prefills its prompt to the end: its first round, without candidates. Before
    that, the requests of `preempted` slots lost their part of the cache, and those in `entering`
    got their slots."""

    decoding: list[int] = field(default_factory=list)
    reading: dict[int, int] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)
    entering: dict[int, str] = field(default_factory=dict)

    @property
    def running(self) -> int:
        """The number of requests that take part."""
        return len({*self.decoding, *self.reading})


class Scheduler:
    """Requests by name. A step begins with :meth:`plan`; after it the caller reports with
    :meth:`grew` and :meth:`leave` what became of the requests.

    Requests enter in the order in which they came. Of the prefilling requests, the oldest gets at
    least half of the rest of a step's budget and the shortest the remainder: a short prompt does
    not wait for long ones, and a long one not for ever. Where the oldest can be prefilled to its
    end, another comes along whole or not at all: a part of it would delay the oldest's first token
    and hardly advance its own.

    When the cache is full, the youngest request is preempted. It leaves the cache and keeps its
    slot and its state. When there is room again, it resumes: its sequence is prefilled again.

    `place` chooses the slot of a request (None: the first free one, which holds nothing of it).
    """

    def __init__(self, limits: Limits, place: Place | None = None) -> None:
        self.limits = limits
        self._place: Place = place or (lambda name, free: (free[0], 0))
        self.waiting: deque[Scheduled] = deque()
        self.running: dict[str, Scheduled] = {}  # in the order in which they entered
        self.preemptions = 0
        self._free = list(range(limits.slots))
        self._candidates = 0.0  # mean of the decoding requests, in the last step

    @property
    def idle(self) -> bool:
        """Whether no request is running or waiting."""
        return not self.running and not self.waiting

    @property
    def blocks(self) -> int:
        """Blocks of the cache that are reserved."""
        return sum(request.blocks for request in self.running.values())

    @property
    def held(self) -> int:
        """Tokens of running requests in the target's cache."""
        return sum(request.read for request in self.running.values())

    @property
    def room(self) -> int | None:
        """Tokens of the cache that no request has reserved; None without a limit."""
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
        """After a round the sequence of `name` has `tokens` tokens. The target's cache holds all
        but the last one."""
        request = self.running[name]
        request.tokens, request.read, request.begun = tokens, tokens - 1, True

    def lost(self) -> None:
        """The cache holds nothing any more: running requests prefill their sequences again."""
        for request in self.running.values():
            request.read = 0

    def fed(self, candidates: Sequence[int]) -> None:
        """Report the number of candidates of each round of the step that was not its request's
        first."""
        if candidates:
            self._candidates = sum(candidates) / len(candidates)

    def plan(self) -> StepPlan:
        """What the next step does. Its prefills count as done."""
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
        slots = sorted(request.slot for request in decoding)
        return StepPlan(slots, reading, preempted, entering)

    def reserve(self) -> list[int]:
        """Reserve room for a round of every running request, the oldest first. A request that gets
        none is preempted, or stays so. Returns the slots of the requests preempted now."""
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
                continue  # the older one resumes first
            needed = wanted[place]
            if request.resting and self.blocks + needed > limit:
                continue  # it never displaces a running request
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
        """Waiting requests enter free slots while the cache has room; none while one is
        preempted."""
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
        """The number of tokens to prefill for each request, by slot; the oldest request is
        first."""
        if self.limits.slots == 1:  # no other request is delayed
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
