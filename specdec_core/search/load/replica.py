"""A simulated engine: the scheduler of the live one, recorded rounds, and a time model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec_core.cost.steps import FEW, EngineWork, StepTimes, Work
from specdec_core.engine.prefixes import Prefixes
from specdec_core.engine.scheduler import Limits, Scheduler, Step
from specdec_core.search.load.answers import Answers, SimulatedRound


class Ask(NamedTuple):
    """What a request asks for: a recorded answer, after a prompt of so many tokens, up to `most`
    tokens of it."""

    answer: int
    prompt_tokens: int
    most: int


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request on its way. Its text has `tokens` tokens, of which target and draft hold so
    many."""

    index: int
    name: str
    ask: Ask
    sent: float
    tokens: int
    held: int = 0
    draft_held: int = 0
    generated: int = 0
    rounds: int = 0
    first: float | None = None


class SimulatedStep(NamedTuple):
    """A step as the scheduler planned it, and the candidates of each request that decoded."""

    plan: Step
    candidates: list[int]


class Replica:
    """An engine that decodes under one configuration. A step is :meth:`begin`, which tells its
    seconds, and :meth:`end`."""

    def __init__(
        self,
        answers: Answers,
        times: StepTimes,
        limits: Limits,
        log: list[SimulatedStep] | None = None,
    ) -> None:
        shares = limits.share_prefixes and answers.texts is not None
        self.scheduler = Scheduler(limits, self._place if shares else None)
        self.prefixes = Prefixes(limits.slots)
        self._begun: dict[int, tuple[int, int]] = {}  # by slot: whose tokens it takes, how many
        self.requests = 0  # unfinished
        self.steps = 0
        self.busy_seconds = 0.0
        self._answers, self._engine = answers, times.engine
        self._draft = times.draft(answers.draft) if answers.draft is not None else None
        self._times = times
        self._mixes = times.mixes
        self._target = times.verifying(False)
        self._last = Step()
        self._waiting: dict[str, SimulatedRequest] = {}
        self._slots: dict[int, SimulatedRequest] = {}  # the last in each slot, finished ones too
        self._rounds: list[tuple[SimulatedRequest, SimulatedRound]] = []  # of the step
        self._log, self._limit = log, limits.slots

    def add(self, request: SimulatedRequest) -> None:
        """A request comes."""
        self._waiting[request.name] = request
        self.scheduler.add(request.name, request.tokens)
        self.requests += 1

    def begin(self) -> float:
        """Seconds of the next step."""
        before, self._last = self._last, (plan := self.scheduler.plan())
        slots = self._slots
        for slot in plan.preempted:
            slots[slot].held = slots[slot].draft_held = 0
        for slot, name in plan.entering.items():
            self._enter(slot, self._waiting.pop(name))
        for slot in self.prefixes.forget(self._held(), self.scheduler.room):
            slots[slot].held = slots[slot].draft_held = 0
        decoding = [slots[slot] for slot in plan.decoding]
        ends = set(plan.decoding)  # whose prompts are read to their ends, if they are read
        reading = [(slots[slot], n) for slot, n in plan.reading.items() if slot not in ends]
        seconds = self._follow([slot for slot in before.reading if slot not in plan.entering])
        self._target = self._times.verifying(seconds > 0)
        together = bool(decoding) and (self._mixes or plan.running == 1)
        if not together:
            seconds += self._read(decoding, reading)
        candidates, added = [], EngineWork()
        if decoding:
            forwards, added = self._decode(decoding, reading if together else [])
            seconds += forwards
            candidates = [each.drafted for _, each in self._rounds]
            self.scheduler.fed([each.drafted for r, each in self._rounds if r.rounds])
        for request, count in reading:
            request.held += count
        read, entering = sum(plan.reading.values()), len(plan.entering)
        seconds += self._engine.seconds(added._replace(read=read, entering=entering))
        self.steps += 1
        self.busy_seconds += seconds
        if self._log is not None:
            self._log.append(SimulatedStep(plan, candidates))
        return seconds

    def end(self, now: float) -> list[SimulatedRequest]:
        """The step is over at `now`; the requests that it finished."""
        finished = []
        for request, each in self._rounds:
            request.tokens += each.generated
            request.generated += each.generated
            request.rounds += 1
            if request.first is None:
                request.first = now
            request.held = request.tokens - 1
            if request.generated >= request.ask.most:
                request.draft_held = min(request.draft_held, request.tokens - each.generated)
                self.prefixes.left(self.scheduler.running[request.name].slot)
                self.scheduler.leave(request.name)
                self.requests -= 1
                finished.append(request)
            else:
                self.scheduler.grew(request.name, request.tokens)
        self._rounds = []
        return finished

    def _place(self, name: str, free: Sequence[int]) -> tuple[int, int]:
        """As the engine does: the slot for a waiting request, and how much of its prompt a slot
        holds already."""
        prompt = self._text(self._waiting[name])
        slot, source, count = self.prefixes.find(prompt, self._held(), free)
        self._begun[slot] = source, count
        return slot, count

    def _held(self) -> list[int]:
        """The tokens in each slot's row."""
        return [self._slots[n].held if n in self._slots else 0 for n in range(self._limit)]

    def _enter(self, slot: int, request: SimulatedRequest) -> None:
        """A request enters a slot, where a beginning of its text may be."""
        if slot in self._begun:
            source, count = self._begun.pop(slot)
            if count:
                request.held = count
                request.draft_held = min(count, self._slots[source].draft_held)
            if text := self._text(request, whole=True):
                self.prefixes.holds(slot, text)
        self._slots[slot] = request

    def _text(self, request: SimulatedRequest, whole: bool = False) -> Sequence[int]:
        """A request's prompt, or with `whole` its whole text; nothing where a trace has another
        length."""
        ask, texts = request.ask, self._answers.texts
        if texts is None or ask.prompt_tokens != self._answers.prompts[ask.answer]:
            return ()
        text = texts[ask.answer]
        return text if whole else text[: ask.prompt_tokens]

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def _follow(self, read: list[int]) -> float:
        """Seconds in which the draft reads what the target has read of the texts in these slots."""
        if self._draft is None or self._answers.lazy:
            return 0.0
        running = {request.slot: request.name for request in self.scheduler.running.values()}
        following = [self._slots[slot] for slot in read if slot in running]
        behind = [request for request in following if request.held > request.draft_held]
        if not behind:
            return 0.0
        rows = [(r.held - r.draft_held, r.draft_held) for r in behind]
        seconds = self._draft.seconds(Work.of(rows))
        for request in behind:
            request.draft_held = request.held
        return seconds

    def _read(
        self, decoding: list[SimulatedRequest], reading: list[tuple[SimulatedRequest, int]]
    ) -> float:
        """Seconds in which the target reads texts apart from verification, which reads their last
        tokens."""
        new = [(r, unread) for r in decoding if (unread := r.tokens - 1 - r.held) > 0]
        new += reading
        if not new:
            return 0.0
        for request in decoding:
            request.held = request.tokens - 1
        return self._target.seconds(Work.of([(count, r.held) for r, count in new]))

    def _decode(
        self, decoding: list[SimulatedRequest], reading: list[tuple[SimulatedRequest, int]]
    ) -> tuple[float, EngineWork]:
        """Seconds of the forwards of a round of those that decode, and what it asks of the engine.
        The drafts' forwards are each over all rows that still draft; the target's is over all rows,
        those of `reading` too."""
        answers, together, number = self._answers, [], len(decoding)
        candidates = fed = cached = lookups = 0
        pairs = few_pairs = 0.0
        looks_up = answers.looks_up(number)
        longest = draft_rows = draft_fed = draft_cached = draft_pairs = 0
        for request in decoding:
            ask, text, held = request.ask, request.tokens, request.held
            each = answers.round(ask.answer, request.generated, request.rounds, number)
            left = ask.most - request.generated
            # Rounds of a whole recorded answer were drafted within its room.
            if each.drafted >= left and ask.most != answers.lengths[ask.answer]:
                each = each.within(left - 1)
            together.append((request, each))
            count = text - held + each.drafted
            seen = count * (held + (count - 1) / 2)
            candidates += each.drafted
            lookups += looks_up and request.rounds > 0
            fed += count
            cached += held
            pairs += seen
            few_pairs += seen if count < FEW else 0
            if forwards := each.draft_forwards:
                if forwards > longest:
                    longest = forwards
                # The first forward reads the text's unread end, of at least one token, too.
                count = each.draft_tokens + text - request.draft_held - 1
                context = request.draft_held + forwards // 2
                draft_rows += forwards
                draft_fed += count
                draft_cached += forwards * context
                draft_pairs += count * context
                request.draft_held = text + min(each.generated, forwards) - 1
        self._rounds = together
        rows, seconds, draft_forwards = number, 0.0, 0
        if longest and self._draft is not None:
            draft_forwards = longest
            few = draft_pairs if draft_fed < FEW * draft_rows else 0
            sums = (draft_rows, draft_fed, draft_cached, draft_pairs, few)
            mean = Work._make(value / longest for value in sums)
            seconds = longest * self._draft.seconds(mean)
            self._target = self._times.verifying(True)
        for request, count in reading:
            seen = count * (request.held + (count - 1) / 2)
            rows += 1
            fed += count
            cached += request.held
            pairs += seen
            few_pairs += seen if count < FEW else 0
        seconds += self._target.seconds(Work(rows, fed, cached, pairs, few_pairs))
        return seconds, EngineWork(number, draft_forwards, candidates, lookups)
