"""A simulated engine: the scheduler of the live one, recorded rounds, and a time model."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec_core.engine.prefixes import Prefixes
from specdec_core.engine.scheduler import Limits, Scheduler, Step, blocks_of
from specdec_core.search.load.step_costs import CostedRound, Course, State, StepCosts


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request on its way: what it asks for (`course`), when it was sent, and when its first
    token came. `round` is its next one, while nothing but rounds changes its state."""

    index: int
    name: str
    course: Course
    sent: float
    state: State
    first: float | None = None
    round: CostedRound | None = None

    @property
    def tokens(self) -> int:
        """Of its text."""
        return self.course.ask.prompt_tokens + self.state.generated

    def holds(self, held: int, read: tuple[int, ...]) -> None:
        """So much of its text is in the caches, of the target and of each draft."""
        self.state, self.round = State(self.state.generated, self.state.rounds, held, read), None


class SimulatedStep(NamedTuple):
    """A step as the scheduler planned it, and the candidates of each request that decoded."""

    plan: Step
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
        self.prefixes = Prefixes(limits.slots)
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
        # for each, who decodes, and for each step the rounds of these and its end.
        self._began = 0.0
        self._plan, self._planned = Step(), True
        self._decoding: list[SimulatedRequest] = []
        self._rounds: list[list[CostedRound]] = []
        self._ends: list[float] = []

    def add(self, request: SimulatedRequest) -> None:
        """A request comes."""
        self._waiting[request.name] = request
        self.scheduler.add(request.name, request.tokens)
        self.requests += 1

    def begin(self, now: float) -> float:
        """Begin a step, or all until a request leaves. Returns when they are over."""
        self._began, self._rounds, self._ends = now, [], []
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
        del self._rounds[step + 1 :], self._ends[step + 1 :]
        return self._ends[step]

    def end(self, now: float) -> list[SimulatedRequest]:
        """The steps are over at `now`; the requests that they finished."""
        rounds, limited = self._rounds[-1], self._limits.blocks is not None
        self.steps += len(self._ends)
        self.busy_seconds += now - self._began
        if limited and not self._planned:
            self._reserve()
        if self._log is not None:
            steps = ([each.drafted for each in of_step] for of_step in self._rounds)
            self._log.extend(SimulatedStep(self._plan, candidates) for candidates in steps)
        self.scheduler.fed([each.drafted for each in rounds if each.state.rounds])
        finished = []
        for request, each in zip(self._decoding, rounds, strict=True):
            request.state, request.round = each.then, None
            begun = each.state.rounds > 0
            if not begun:
                request.first = now
            if each.last:
                self._leave(request, each)
                finished.append(request)
                continue
            if begun:
                request.round = each.follow()
            if limited or not begun:  # else its length is no matter
                self.scheduler.grew(request.name, request.tokens)
        return finished

    def _leave(self, request: SimulatedRequest, last: CostedRound) -> None:
        # Nothing that the last round wrote is in the drafts' caches.
        before = request.course.ask.prompt_tokens + last.state.generated
        request.holds(last.then.held, tuple(min(n, before) for n in last.then.read))
        self.prefixes.left(self.scheduler.running[request.name].slot)
        self.scheduler.leave(request.name)
        self.requests -= 1

    def _go_on(self) -> bool:
        """Steps that decode the requests that run, to the first that finishes one, or as long as
        the cache is large enough. Whether there is any."""
        slots = sorted(request.slot for request in self.scheduler.running.values())
        decoding, limit = [self._slots[slot] for slot in slots], self._limits.blocks
        if limit is not None and sum(blocks_of(r.tokens) for r in decoding) > limit:
            return False
        costs, now = self._costs, self._began
        seconds = self._follow(self._plan.reading)
        rounds = self._next(decoding)
        seconds += costs.seconds([each.share for each in rounds], drafting=seconds > 0)
        while True:
            now += seconds
            self._ends.append(now)
            self._rounds.append(rounds)
            after = [each.after for each in rounds if each.after is not None]
            if len(after) < len(rounds):
                if any(each.last for each in rounds):
                    break
                after = [each.follow() for each in rounds]
            if limit is not None and sum(blocks_of(r.state.held + 1) for r in after) > limit:
                break
            rounds = after
            if len(rounds) == 1:
                seconds = rounds[0].alone()
            else:
                seconds = costs.seconds([each.share for each in rounds])
        self._plan, self._decoding = Step(slots), decoding
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
        rounds = self._next(decoding)
        shares += [each.share for each in rounds]
        seconds += costs.seconds(shares, drafting)
        seconds += costs.beginning(sum(plan.reading.values()), len(plan.entering))
        for request, count in reading:
            request.holds(request.state.held + count, request.state.read)
        self._rounds.append(rounds)
        self._ends.append(self._began + seconds)

    def _next(self, decoding: Sequence[SimulatedRequest]) -> list[CostedRound]:
        """The rounds of those that decode."""
        least = self._least[len(decoding)]
        return [
            r.round if r.round and r.round.least == least else r.course.round(least, r.state)
            for r in decoding
        ]

    def _reserve(self) -> None:
        """Have the scheduler reserve what the last step took, as before a step that it plans."""
        for request, each in zip(self._decoding, self._rounds[-1], strict=True):
            self.scheduler.grew(request.name, each.state.held + 1)
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
        if not read or self._answers.draft is None or self._answers.lazy:
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
