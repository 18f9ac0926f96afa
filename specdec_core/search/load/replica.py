"""A simulated engine: the scheduler of the live one, recorded rounds, and a time model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from specdec_core.engine.prefixes import CachedPrefixes
from specdec_core.engine.scheduler import Limits, Scheduler, StepPlan
from specdec_core.search.load.step_costs import RequestRounds, RoundSpan, State, StepCosts


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request on its way: what it asks for (`course`), when it was sent, and when its first
    token came. It is in the state `before`, or has `done` so many rounds of a `stretch` since."""

    index: int
    name: str
    course: RequestRounds
    sent: float
    before: State
    stretch: RoundSpan | None = None
    done: int = 0
    first: float | None = None

    @property
    def state(self) -> State:
        return self.before if self.stretch is None else self.stretch.state(self.done)

    @property
    def tokens(self) -> int:
        """Of its text."""
        return self.course.ask.prompt_tokens + self.state.generated

    def holds(self, held: int, read: tuple[int, ...]) -> None:
        """So much of its text is in the caches, of the target and of each draft."""
        state = self.state
        self.before = State(state.generated, state.rounds, held, read)
        self.stretch, self.done = None, 0

    def goes_on(self, least: int) -> RoundSpan:
        """Its next rounds, while at least `least` requests decode: those of its stretch that are
        not done."""
        stretch = self.stretch
        if stretch is None or stretch.least != least or self.done == stretch.rounds:
            self.before = self.state
            stretch = self.stretch = self.course.stretch(least, self.before)
            self.done = 0
        return stretch


class SimulatedStep(NamedTuple):
    """A step as the scheduler planned it, and the candidates of each request that decoded."""

    plan: StepPlan
    candidates: list[int]


class Replica:
    """An engine that decodes under one configuration. :meth:`begin` begins a step, or at once as
    many as only decode the same requests, and :meth:`end` ends them. When a request comes that may
    enter, :meth:`interrupt` takes back those that have not begun by then."""

    def __init__(
        self, costs: StepCosts, limits: Limits, log: list[SimulatedStep] | None = None
    ) -> None:
        answers = costs.answers
        shares = limits.share_prefixes and answers.texts is not None
        self.scheduler = Scheduler(limits, self._place if shares else None)
        self.prefixes = CachedPrefixes(limits.slots)
        self._begun: dict[int, tuple[int, int]] = {}  # by slot: whose tokens it takes, how many
        self.requests = 0  # unfinished
        self.steps = 0
        self.busy_seconds = 0.0
        self._costs, self._answers, self._limits = costs, answers, limits
        self._least = [answers.least(max(n, 1)) for n in range(limits.slots + 1)]
        self._waiting: dict[str, SimulatedRequest] = {}
        self._slots: dict[int, SimulatedRequest] = {}  # the last in each slot, finished ones too
        self._log = log
        # Of the steps under way: when they began, what the scheduler planned or would have planned
        # for each, who decodes, a round of its stretch in each, and when each ends.
        self._began = 0.0
        self._plan, self._planned = StepPlan(), True
        self._decoding: list[SimulatedRequest] = []
        self._ends: list[float] = []

    def add(self, request: SimulatedRequest) -> None:
        """A request comes."""
        self._waiting[request.name] = request
        self.scheduler.add(request.name, request.tokens)
        self.requests += 1

    def begin(self, now: float) -> float:
        """Begin a step, or all until a request leaves. Returns when they are over."""
        self._began, self._ends = now, []
        self._planned = not (self.scheduler.settled and self._go_on())
        if self._planned:
            self._step()
        return self._ends[-1]

    def interrupt(self, now: float) -> float | None:
        """At `now` a request has come. Returns when the step under way is over, unless no other was
        to follow it, or has to as no slot is free."""
        step = bisect_left(self._ends, now)
        if self.scheduler.full or step + 1 >= len(self._ends):
            return None
        del self._ends[step + 1 :]
        return self._ends[step]

    def end(self, now: float) -> list[SimulatedRequest]:
        """The steps are over at `now`; the requests that they finished."""
        steps, limited = len(self._ends), self._limits.blocks is not None
        self.steps += steps
        self.busy_seconds += now - self._began
        if limited and not self._planned:
            self._reserve()
        stretches = [(request, request.stretch) for request in self._decoding if request.stretch]
        if self._log is not None:
            for step in range(steps):
                candidates = [stretch.drafted[r.done + step] for r, stretch in stretches]
                self._log.append(SimulatedStep(self._plan, candidates))
        last = steps - 1
        self.scheduler.fed([s.drafted[r.done + last] for r, s in stretches if r.first is not None])
        finished = []
        for request, stretch in stretches:
            request.done += steps
            begun = request.first is not None
            if not begun:
                request.first = now
            if request.done == stretch.rounds and stretch.ends:
                self._leave(request)
                finished.append(request)
            elif limited or not begun:  # else its length is no matter
                self.scheduler.grew(request.name, request.tokens)
        return finished

    def _leave(self, request: SimulatedRequest) -> None:
        # Nothing that the last round wrote is in the drafts' caches.
        assert request.stretch is not None
        last, state = request.stretch.state(request.done - 1), request.state
        before = request.course.ask.prompt_tokens + last.generated
        request.holds(state.held, tuple(min(n, before) for n in state.read))
        self.prefixes.left(self.scheduler.running[request.name].slot)
        self.scheduler.leave(request.name)
        self.requests -= 1

    def _go_on(self) -> bool:
        """Steps that decode the requests that run, to the first that finishes one, or as long as
        the cache is large enough. Whether there is any."""
        slots = sorted(request.slot for request in self.scheduler.running.values())
        decoding, limit = [self._slots[slot] for slot in slots], self._limits.blocks
        blocks_of = self._limits.blocks_of
        if limit is not None and sum(blocks_of(r.tokens) for r in decoding) > limit:
            return False
        costs = self._costs
        following = self._follow(self._plan.reading)
        drafting, least = following > 0, self._least[len(decoding)]
        rows = [(request.goes_on(least), request.done) for request in decoding]
        steps = min(stretch.rounds - done for stretch, done in rows)
        if limit is not None:
            for step in range(1, steps):
                if sum(blocks_of(s.held(done + step) + 1) for s, done in rows) > limit:
                    steps = step
                    break
        [(stretch, done), *others] = rows
        if not others and drafting == (costs.reads_along and not done):
            seconds = stretch.alone[done : done + steps]
        else:
            steps_shares = zip(*(s.shares[done : done + steps] for s, done in rows), strict=True)
            seconds = [costs.seconds(next(steps_shares), drafting)]
            seconds += map(costs.seconds, steps_shares)
        seconds[0] += following
        self._ends = list(accumulate(seconds, initial=self._began))[1:]
        self._plan, self._decoding = StepPlan(slots), decoding
        return True

    def _step(self) -> None:
        """The next step as the scheduler plans it."""
        before, self._plan = self._plan, (plan := self.scheduler.plan())
        slots, costs = self._slots, self._costs
        for slot in plan.preempted:
            slots[slot].holds(0, costs.unread)
        for slot, name in plan.entering.items():
            self._enter(slot, self._waiting.pop(name))
        self._forget()
        decoding = self._decoding = [slots[slot] for slot in plan.decoding]
        ends = set(plan.decoding)  # whose prompts are read to their ends, if they are read
        reading = [(slots[slot], n) for slot, n in plan.reading.items() if slot not in ends]
        seconds = self._follow([slot for slot in before.reading if slot not in plan.entering])
        drafting = seconds > 0
        shares = [costs.reading(count, request.state.held) for request, count in reading]
        if decoding and not (costs.mixes or plan.running == 1):
            # Texts are read apart from verification, which reads their last tokens.
            for request in decoding:
                if (unread := request.tokens - 1 - request.state.held) > 0:
                    shares.append(costs.reading(unread, request.state.held))
                    request.holds(request.tokens - 1, request.state.read)
            seconds += costs.prefill(shares, drafting) if shares else 0.0
            shares = []
        least = self._least[len(decoding)]
        rows = [(request.goes_on(least), request.done) for request in decoding]
        shares += [stretch.shares[done] for stretch, done in rows]
        seconds += costs.seconds(shares, drafting)
        seconds += costs.beginning(sum(plan.reading.values()), len(plan.entering))
        for request, count in reading:
            request.holds(request.state.held + count, request.state.read)
        self._ends.append(self._began + seconds)

    def _reserve(self) -> None:
        """Have the scheduler reserve what the last step took, as before a step that it plans."""
        last = len(self._ends) - 1
        for request in self._decoding:
            assert request.stretch is not None
            self.scheduler.grew(request.name, request.stretch.held(request.done + last) + 1)
        self.scheduler.reserve()
        self._forget()

    def _forget(self) -> None:
        """Free slots leave the cache to those that run."""
        if (room := self.scheduler.room) is not None:
            for slot in self.prefixes.forget(self._held(), room):
                self._slots[slot].holds(0, self._costs.unread)

    def _follow(self, read: Collection[int]) -> float:
        """Seconds in which the draft reads what the target has read of the texts in these slots. It
        is the only one: of several, each is lazy."""
        if not read or not self._costs.reads_along:
            return 0.0
        rows = []
        running = {request.slot for request in self.scheduler.running.values()}
        for request in (self._slots[slot] for slot in read if slot in running):
            held, (first, *others) = request.state.held, request.state.read
            if held > first:
                rows.append((held - first, first))
                request.holds(held, (held, *others))
        return self._costs.following(rows) if rows else 0.0

    def _place(self, name: str, free: Sequence[int]) -> tuple[int, int]:
        """As the engine does: the slot for a waiting request, and how much of its prompt a slot
        holds already."""
        prompt = self._text(self._waiting[name])
        slot, source, count = self.prefixes.find(prompt, self._held(), free)
        self._begun[slot] = source, count
        return slot, count

    def _held(self) -> list[int]:
        """The tokens in each slot's row."""
        slots = self._slots
        return [slots[n].state.held if n in slots else 0 for n in range(self._limits.slots)]

    def _enter(self, slot: int, request: SimulatedRequest) -> None:
        """A request enters a slot, where a beginning of its text may be."""
        source, count = self._begun.pop(slot, (slot, 0))
        if count:
            request.holds(count, tuple(min(count, n) for n in self._slots[source].state.read))
        self.prefixes.holds(slot, self._text(request, whole=True))
        self._slots[slot] = request

    def _text(self, request: SimulatedRequest, whole: bool = False) -> Sequence[int]:
        """A request's prompt, or with `whole` its whole text; nothing where a trace has another
        length."""
        ask, texts = request.course.ask, self._answers.texts
        if texts is None or ask.prompt_tokens != self._answers.prompts[ask.answer]:
            return ()
        text = texts[ask.answer]
        return text if whole else text[: ask.prompt_tokens]

    @property
    def idle(self) -> bool:
        return self.scheduler.idle
