"""A simulated engine: the scheduler of the live one, recorded rounds, and a time model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec_core.cost.steps import FEW, EngineWork, ForwardTerms, StepTimes, Work
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
    """A request on its way. Its text has `tokens` tokens, of which target and drafts hold so
    many."""

    index: int
    name: str
    ask: Ask
    sent: float
    tokens: int
    held: int = 0
    drafts_held: dict[str, int] = field(default_factory=dict)  # by the draft's name
    generated: int = 0
    rounds: int = 0
    first: float | None = None

    def forget(self) -> None:
        """Its slot is emptied."""
        self.held = 0
        self.drafts_held.clear()


@dataclass(slots=True)
class DraftWork:
    """What a draft's forwards of a step do, each over the rows that still draft: how many there
    are, and the sums over their rows as in :class:`Work`."""

    forwards: int = 0
    rows: int = 0
    fed: int = 0
    cached: int = 0
    pairs: int = 0

    def add(self, forwards: int, fed: int, held: int) -> None:
        """A row with so many forwards, which feed `fed` tokens after `held` ones."""
        context = held + forwards // 2
        self.forwards = max(self.forwards, forwards)
        self.rows += forwards
        self.fed += fed
        self.cached += forwards * context
        self.pairs += fed * context

    def seconds(self, terms: ForwardTerms) -> float:
        few = self.pairs if self.fed < FEW * self.rows else 0
        sums = (self.rows, self.fed, self.cached, self.pairs, few)
        return self.forwards * terms.seconds(Work._make(n / self.forwards for n in sums))


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
        self._times = times
        self._drafts: dict[str, ForwardTerms] = {}
        if answers.draft is not None:
            self._terms(answers.draft)  # which raises without them
        self._mixes = times.mixes
        self._drafting = False  # whether a draft has had a forward in the step
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
            slots[slot].forget()
        for slot, name in plan.entering.items():
            self._enter(slot, self._waiting.pop(name))
        for slot in self.prefixes.forget(self._held(), self.scheduler.room):
            slots[slot].forget()
        decoding = [slots[slot] for slot in plan.decoding]
        ends = set(plan.decoding)  # whose prompts are read to their ends, if they are read
        reading = [(slots[slot], n) for slot, n in plan.reading.items() if slot not in ends]
        seconds = self._follow([slot for slot in before.reading if slot not in plan.entering])
        self._drafting = seconds > 0
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
                before = request.tokens - each.generated
                held = request.drafts_held.items()
                request.drafts_held = {draft: min(n, before) for draft, n in held}
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
                held = self._slots[source].drafts_held.items()
                request.drafts_held = {draft: min(count, n) for draft, n in held}
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
        """Seconds in which the draft reads what the target has read of the texts in these slots. It
        is the only one: of several, each is lazy."""
        draft = self._answers.draft
        if draft is None or self._answers.lazy:
            return 0.0
        running = {request.slot: request.name for request in self.scheduler.running.values()}
        following = [self._slots[slot] for slot in read if slot in running]
        rows = []
        for request in following:
            held = request.drafts_held.get(draft, 0)
            if request.held > held:
                rows.append((request.held - held, held))
                request.drafts_held[draft] = request.held
        return self._terms(draft).seconds(Work.of(rows)) if rows else 0.0

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
        target = self._times.verifying(self._drafting, candidates=False)
        return target.seconds(Work.of([(count, r.held) for r, count in new]))

    def _decode(
        self, decoding: list[SimulatedRequest], reading: list[tuple[SimulatedRequest, int]]
    ) -> tuple[float, EngineWork]:
        """Seconds of the forwards of a round of those that decode, and what it asks of the engine.
        A draft's forwards are each over all rows that still draft with it, and drafts take turns;
        the target's forward is over all rows, those of `reading` too."""
        answers, together, number = self._answers, [], len(decoding)
        candidates = fed = cached = lookups = 0
        pairs = few_pairs = 0.0
        looks_up = answers.looks_up(number)
        drafting: dict[str, DraftWork] = {}
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
            draft = each.draft or answers.draft
            if (forwards := each.draft_forwards) and draft is not None:
                read = request.drafts_held.get(draft, 0)
                # The first forward reads the text's unread end, of at least one token, too.
                work = drafting.setdefault(draft, DraftWork())
                work.add(forwards, each.draft_tokens + text - read - 1, read)
                request.drafts_held[draft] = text + min(each.generated, forwards) - 1
        self._rounds = together
        rows, seconds, draft_forwards = number, 0.0, 0
        for draft, work in drafting.items():
            draft_forwards += work.forwards
            seconds += work.seconds(self._terms(draft))
            self._drafting = True
        for request, count in reading:
            seen = count * (request.held + (count - 1) / 2)
            rows += 1
            fed += count
            cached += request.held
            pairs += seen
            few_pairs += seen if count < FEW else 0
        target = self._times.verifying(self._drafting, candidates > 0)
        seconds += target.seconds(Work(rows, fed, cached, pairs, few_pairs))
        return seconds, EngineWork(number, draft_forwards, candidates, lookups)

    def _terms(self, draft: str) -> ForwardTerms:
        """The times of a draft's forwards. Raises :class:`UserError` where there are none."""
        if draft not in self._drafts:
            self._drafts[draft] = self._times.draft(draft)
        return self._drafts[draft]
