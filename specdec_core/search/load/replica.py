"""A simulated engine: the scheduler of the live one, recorded rounds, and a time model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from specdec_core.engine.scheduler import Limits, Scheduler, StepPlan
from specdec_core.search.load.step_costs import RequestShape, RoundCost, State, StepCosts


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request, when it was sent, and when its first token came."""

    index: int
    name: str
    shape: RequestShape
    sent: float
    state: State
    first: float | None = None

    @property
    def tokens(self) -> int:
        """Of its sequence."""
        return self.shape.prompt_tokens + self.state.generated

    def cached(self, held: int, read: tuple[int, ...]) -> None:
        """Set the tokens of its sequence in the caches of the target and of each draft."""
        self.state = self.state._replace(held=held, read=read)


class Replica:
    """An engine that decodes under one configuration: :meth:`begin` begins a step, :meth:`end` ends
    it."""

    def __init__(self, costs: StepCosts, limits: Limits) -> None:
        answers = costs.answers
        self.scheduler = Scheduler(limits)
        self.requests = 0  # unfinished
        self.steps = 0
        self.busy_seconds = 0.0
        self._costs = costs
        self._least = [answers.least(max(n, 1)) for n in range(limits.slots + 1)]
        self._waiting: dict[str, SimulatedRequest] = {}
        self._slots: dict[int, SimulatedRequest] = {}  # the last in each slot, finished ones too
        self._began, self._plan = 0.0, StepPlan()  # of the last step
        self._rounds: list[tuple[SimulatedRequest, RoundCost]] = []  # of the last step

    def add(self, request: SimulatedRequest) -> None:
        """A request arrives."""
        self._waiting[request.name] = request
        self.scheduler.add(request.name, request.tokens)
        self.requests += 1

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def begin(self, now: float) -> float:
        """Begin the step that the scheduler plans. Returns when it ends."""
        before, plan = self._plan, self.scheduler.plan()
        self._began, self._plan = now, plan
        slots, costs = self._slots, self._costs
        for slot in plan.preempted:
            slots[slot].cached(0, costs.unread)
        for slot, name in plan.entering.items():
            slots[slot] = self._waiting.pop(name)
        decoding = [slots[slot] for slot in plan.decoding]
        # The other prefilling requests reach the end of their prompts, and decode in this step.
        ends = set(plan.decoding)
        reading = [(slots[slot], n) for slot, n in plan.reading.items() if slot not in ends]
        seconds = self._follow([slot for slot in before.reading if slot not in plan.entering])
        shares = [costs.prefill_share(count, request.state.held) for request, count in reading]
        if decoding and not (costs.mixes or plan.running == 1):
            # A forward before the verification prefills all but the last token, which that feeds.
            for request in decoding:
                if (missing := request.tokens - 1 - request.state.held) > 0:
                    shares.append(costs.prefill_share(missing, request.state.held))
                    request.cached(request.tokens - 1, request.state.read)
            seconds += costs.prefill(shares) if shares else 0.0
            shares = []
        least = self._least[len(decoding)]
        self._rounds = [(each, costs.round(each.shape, least, each.state)) for each in decoding]
        shares += [cost.share for _, cost in self._rounds]
        seconds += costs.seconds(shares)
        for request, count in reading:
            request.cached(request.state.held + count, request.state.read)
        return now + seconds

    def end(self, now: float) -> list[SimulatedRequest]:
        """The step ends at `now`; returns the requests that it finished."""
        self.steps += 1
        self.busy_seconds += now - self._began
        rounds = self._rounds
        self.scheduler.fed([cost.drafted for each, cost in rounds if each.first is not None])
        finished = []
        for request, cost in rounds:
            request.state = cost.after
            if request.first is None:
                request.first = now
            if request.state.generated >= request.shape.most:
                self.scheduler.leave(request.name)
                self.requests -= 1
                finished.append(request)
            else:
                self.scheduler.grew(request.name, request.tokens)
        return finished

    def _follow(self, slots: Collection[int]) -> float:
        """Seconds in which the draft prefills what the target has prefilled in these slots. It is
        the only draft: of several, each is lazy."""
        if not slots or not self._costs.reads_along:
            return 0.0
        rows = []
        running = {request.slot for request in self.scheduler.running.values()}
        for request in (self._slots[slot] for slot in slots if slot in running):
            held, (first, *others) = request.state.held, request.state.read
            if held > first:
                rows.append((held - first, first))
                request.cached(held, (held, *others))
        return self._costs.following(rows) if rows else 0.0
