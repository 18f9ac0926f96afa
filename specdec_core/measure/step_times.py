"""Measuring the times of engine steps on this machine.

Forwards are measured at shapes drawn at random: some decoding rows with some candidates each and
contexts of their own, with or without a chunk of a prompt among them. The target is measured after
forwards of the drafts, which leave little of its weights in the processor's caches, and alone.
Short runs of an engine tell what it adds, and how much longer the same forwards take between the
rest of its work.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from specdec_core.base.environment import machine
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import Configuration, DrafterSettings, PairSpec
from specdec_core.cost.steps import (
    FEW,
    EngineTerms,
    EngineWork,
    ForwardTerms,
    PackedForward,
    StepTimes,
    Work,
    fit_quality,
    load_step_times,
)
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.fingerprints import fingerprints
from specdec_core.models.pair import Pair, load_pair
from specdec_core.models.runner import Batch, ModelRunner, Output

SLOTS = 16
SHAPES = 48  # forwards of each model
CHUNKS = (FEW, 32, 64, 128, 192, 256)  # tokens of a prompt in a forward
_CANDIDATES = (0, 0, 1, 2, 3, 4, 6, 8, 12)  # of a row
_LONGEST = 512  # context
_TURNS = 4  # of a round's forwards; the last one is timed
# Tokens that prompts repeat; runs without candidates use all lengths, other runs the first.
_HALVES = (96, 24, 192)
_ANSWER, _LONG_ANSWER = 24, 72  # tokens of the longest answers; in runs without candidates
_ALIKE = 8  # steps that tell what such steps take, at least
_EACH = 3  # requests for each that is answered at a time, of a run that measures the engine
# The target after a draft, alone, and in decoding without candidates; never a draft's name.
_TARGET, _ALONE, STEADY = "\0target", "\0alone", "\0steady"

Row = tuple[int, int]  # tokens fed, tokens held before


@dataclass
class StepMeasurement:
    """Step times, the forwards that they were fitted to, by draft (None: the target), and how well
    the fit meets them: R² and median relative error."""

    times: StepTimes
    forwards: dict[str | None, list[PackedForward]] = field(default_factory=dict)

    def quality(self, draft: str | None) -> tuple[float, float]:
        terms = self.times.target if draft is None else self.times.drafts[draft]
        return fit_quality(terms, self.forwards[draft])


class LiveForward(NamedTuple):
    """A forward of an engine, and how many times as long it took as such forwards by themselves.
    The target's, of steps with a draft's or without, are told apart."""

    model: str
    work: Work
    slowdown: float


@dataclass(frozen=True)
class EngineRuns:
    """What short runs of an engine tell of it."""

    terms: EngineTerms = field(default_factory=EngineTerms)
    forwards: Sequence[LiveForward] = ()


class StepMeasurer:
    """Measures forwards of every model at `shapes` shapes of up to `slots` rows.

    Models and shapes take turns, as the forwards of steps do, so that a change of the machine's
    load falls on all alike. Passes may be spread over other work, to tell what forwards cost while
    that was done.
    """

    def __init__(self, pair: Pair, slots: int = SLOTS, shapes: int = SHAPES) -> None:
        self.pair, self.slots = pair, slots
        self._machine = machine()
        # As many rows again hold the longest contexts. Each measured row begins like one
        # such row: rows that share memory are read faster than the rows of different requests.
        self._drafts = {name: pair.open_alone(name, 2 * slots) for name in pair.drafts}
        self._target = pair.open_runner(None, 2 * slots)
        longest = min(_LONGEST, pair.max_length // 2)
        for runner in self._runners:
            for row in range(slots, 2 * slots):
                runner.prefill([row], [[1] * longest])
        self._shapes = list(step_shapes(slots, shapes, longest, pair.max_length))
        self.forget()
        self.measure()  # compiles kernels for the shapes
        self.forget()

    def forget(self) -> None:
        """Begin anew, with the same shapes."""
        names = (_TARGET, _ALONE, *self._drafts)
        self._samples: dict[str, list[list[float]]] = {
            name: [[] for _ in self._shapes] for name in names
        }

    def measure(self) -> None:
        """A pass: every shape once."""
        target = self._target
        for number, shape in enumerate(self._shapes):
            for runner in self._runners:
                for row, (_, context) in enumerate(shape):
                    runner.fork(self.slots + row, [row], [context])
            # A chunk of a prompt is prefilled once. Rounds follow rounds, and only after several of
            # them the processor's caches are as in decoding.
            turns = 1 if _reads(shape) else _TURNS
            for turn in range(turns):
                for name, runner in self._drafts.items():
                    # The first forward of a chain follows the target's, a further one the draft's.
                    both = _time(runner, shape), _time(runner, shape)
                    if turn == turns - 1:
                        self._samples[name][number].append(sum(both) / 2)
                seconds = _time(target, shape)
            self._samples[_TARGET][number].append(seconds)
            for _ in range(turns + 1):
                seconds = _time(target, shape)
            self._samples[_ALONE][number].append(seconds)

    def measured(self, runs: EngineRuns | None = None) -> StepMeasurement:
        """A fit of the medians of all passes since the last :meth:`forget` and of the forwards of
        an engine's runs, at the speed of the passes; with what the engine adds."""
        forwards = {
            name: [
                PackedForward(seconds=statistics.median(each), **Work.of(shape)._asdict())
                for each, shape in zip(by_shape, self._shapes, strict=True)
            ]
            for name, by_shape in self._samples.items()
        }
        alone = {name: ForwardTerms.fit(measured) for name, measured in forwards.items()}
        runs = runs or EngineRuns()
        if any(name == STEADY for name, _, _ in runs.forwards):
            # What a step takes that reads prompts beside those that decode is the shapes' to tell.
            timed = zip(forwards[_ALONE], self._shapes, strict=True)
            forwards[STEADY] = [each for each, shape in timed if _reads(shape)]
        for name, work, slowdown in runs.forwards:
            seconds = slowdown * alone[_ALONE if name == STEADY else name].seconds(work)
            forwards[name].append(PackedForward(seconds=seconds, **work._asdict()))
        terms = {name: ForwardTerms.fit(measured) for name, measured in forwards.items()}
        times = StepTimes(
            target=terms.pop(_TARGET),
            alone=terms.pop(_ALONE),
            autoregressive=terms.pop(STEADY, None),
            drafts=terms,
            engine=runs.terms,
            device=str(self.pair.target.device),
            mixes=self._target.mixes,
            pair=self.pair.spec,
            fingerprints=self.pair.fingerprints,
            machine=self._machine,
            slots=self.slots,
        )
        by_draft: dict[str | None, list[PackedForward]] = {None: forwards[_TARGET]}
        return StepMeasurement(times, by_draft | {name: forwards[name] for name in self._drafts})

    @property
    def _runners(self) -> tuple[ModelRunner, ...]:
        return (self._target, *self._drafts.values())


def measure_steps(
    pair: Pair,
    slots: int = SLOTS,
    shapes: int = SHAPES,
    repeats: int = 5,
    observer: Observer | None = None,
) -> StepMeasurement:
    """Measure forwards of every model in `repeats` passes and in runs of an engine, and what the
    engine adds."""
    observer = observer or Observer()
    observer.stage("measuring steps", repeats)
    measurer = StepMeasurer(pair, slots, shapes)
    for _ in range(repeats):
        measurer.measure()
        observer.step()
    times = measurer.measured().times
    return measurer.measured(engine_runs(pair, times, slots, observer))


def step_shapes(slots: int, count: int, longest: int, max_length: int) -> Iterator[list[Row]]:
    """The rows of `count` forwards, the same for the same arguments. A third of the forwards have a
    chunk of a prompt."""
    rng = random.Random(0)
    sizes = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if n < slots] + [slots]
    chunks = [n for n in CHUNKS if n <= max_length - longest] or [max(max_length - longest, 1)]
    for number in range(count):
        rows = sizes[number % len(sizes)]
        most = rng.choice(_CANDIDATES)
        longest_here = rng.choice((longest // 8, longest // 2, longest))
        shape = [(1 + rng.randint(0, most), rng.randint(0, longest_here)) for _ in range(rows)]
        if number % 3 == 2:
            shape[-1] = (rng.choice(chunks), rng.choice((0, longest // 2)))
        yield shape


def _reads(shape: Sequence[Row]) -> bool:
    """Whether a chunk of a prompt is among the rows."""
    return any(count >= FEW for count, _ in shape)


def _time(runner: ModelRunner, shape: Sequence[Row]) -> float:
    """Seconds of a forward of the rows; it restores their contexts. Logits of decoding
    rows are wanted."""
    tokens = [[1] * count for count, _ in shape]
    wanted = [count if count < FEW else 0 for count, _ in shape]
    if not any(wanted):
        wanted[0] = 1
    start = perf_counter()
    output = runner.forward(Batch(range(len(shape)), tokens, wanted=wanted))
    if runner.device.type != "cpu":
        output.choices()  # waits for the device; on a CPU it is counted with what the engine adds
    seconds = perf_counter() - start
    for row, (_, context) in enumerate(shape):
        runner.truncate(row, context)
    return seconds


class LoggedStep(NamedTuple):
    """A step of an engine: its seconds, each forward with its draft (None: the target), work and
    seconds, and what the engine did beside forwards, lookups left out."""

    seconds: float
    forwards: list[tuple[str | None, Work, float]]
    work: EngineWork

    @property
    def forward_seconds(self) -> float:
        return sum(seconds for _, _, seconds in self.forwards)

    def predicted(self, times: StepTimes) -> float:
        """Seconds of the forwards by `times`."""
        target = times.verifying(bool(self.work.draft_forwards))
        return sum(
            (target if draft is None else times.drafts[draft]).seconds(work)
            for draft, work, _ in self.forwards
        )


class LoggedEngine:
    """An engine that logs its steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.log: list[LoggedStep] = []
        self._forwards: list[tuple[str | None, Work, float]] = []
        self._watched: set[int] = set()
        self._watch(engine.target, None)

    def watch_draft(self, name: str) -> None:
        """Log the forwards of a draft, too."""
        self._watch(self.engine.drafts.open(name), name)

    def step(self) -> list[tuple[str, bool]]:
        """A step: the requests that decoded, by id, and whether each is finished."""
        self._forwards = []
        start = perf_counter()
        chunks = self.engine.step(texts=False)
        seconds, plan = perf_counter() - start, self.engine.last
        fed = sum(int(work.tokens) for draft, work, _ in self._forwards if draft is None)
        read = sum(plan.reading.values())
        # A first round has no candidates; it feeds the last token of the prompt.
        verifying = len(set(plan.decoding) - plan.reading.keys())
        work = EngineWork(
            rows=len(plan.decoding),
            draft_forwards=sum(draft is not None for draft, _, _ in self._forwards),
            candidates=max(fed - read - verifying, 0),
            read=read,
            entering=len(plan.entering),
        )
        self.log.append(LoggedStep(seconds, self._forwards, work))
        return [(chunk.request_id, chunk.finished is not None) for chunk in chunks]

    def _watch(self, runner: ModelRunner, draft: str | None) -> None:
        if id(runner) in self._watched:
            return
        self._watched.add(id(runner))
        forward = runner.forward

        def logged(batch: Batch) -> Output:
            held = [runner.lengths[row] for row in batch.rows]
            work = Work.of(zip(map(len, batch.tokens), held, strict=True))
            start = perf_counter()
            output = forward(batch)
            self._forwards.append((draft, work, perf_counter() - start))
            return output

        runner.forward = logged  # type: ignore[method-assign]


def engine_runs(pair: Pair, times: StepTimes, slots: int, observer: Observer) -> EngineRuns:
    """Short runs of an engine with 1, a few and all slots busy, without a draft, with each, and
    with lookups; `times` were fitted to isolated forwards."""
    policy = FixedSettings(max_tokens=4)
    drafters: list[DrafterSettings | None] = [None, SuffixSettings()]
    drafters += [DraftModelSettings(draft=name, policy=policy) for name in times.drafts]
    # Elsewhere a forward returns before it is done.
    waits = pair.target.device.type == "cpu"
    works: list[EngineWork] = []
    rest: list[float] = []
    live: list[LiveForward] = []
    observer.stage("measuring the engine", len(drafters))
    logged = LoggedEngine(Engine(pair, slots=slots))
    for name in times.drafts:
        logged.watch_draft(name)
    for drafter in drafters:
        logged.engine.configure(Configuration(drafter=drafter))
        looked_up = isinstance(drafter, SuffixSettings)
        answer = _LONG_ANSWER if drafter is None else _ANSWER
        for half in _HALVES if drafter is None else _HALVES[:1]:
            logs: list[list[LoggedStep]] = []
            for together in sorted({1, max(slots // 4, 1), slots}):
                for _ in range(2):  # the first run compiles kernels for new shapes
                    logged.log = []
                    coming = _repeating(logged.engine, _EACH * together, half, answer)
                    for request in islice(coming, together):
                        logged.engine.add(request)
                    while not logged.engine.idle:
                        done = sum(finished for _, finished in logged.step())
                        for request in islice(coming, done):
                            logged.engine.add(request)
                logs.append(logged.log)
            for step in chain.from_iterable(logs):
                lookups = step.work.rows if looked_up else 0
                works.append(step.work._replace(lookups=lookups))
                forwards = step.forward_seconds if waits else step.predicted(times)
                rest.append(step.seconds - forwards)
            if waits and drafter is None:
                steady = _typical(chain.from_iterable(logs), times, _ALIKE)
                live += (each._replace(model=STEADY) for each in steady)
            elif waits:
                live += chain.from_iterable(_typical(log, times) for log in logs)
        observer.step()
    return EngineRuns(EngineTerms.fit(works, rest), live)


def _typical(
    steps: Iterable[LoggedStep], times: StepTimes, least: int = 1
) -> Iterator[LiveForward]:
    """For each model and number of rows that only decode, in at least `least` steps, the forward
    with the median slowdown."""
    terms = {_TARGET: times.target, _ALONE: times.verifying(False), **times.drafts}
    alike: dict[tuple[str, float], list[LiveForward]] = defaultdict(list)
    for step in (step for step in steps if not step.work.read):
        verifying = _TARGET if step.work.draft_forwards else _ALONE
        for draft, work, seconds in step.forwards:
            model = draft or verifying
            slowdown = seconds / terms[model].seconds(work)
            alike[model, work.rows].append(LiveForward(model, work, slowdown))
    for each in alike.values():
        if len(each) >= least:
            yield sorted(each, key=attrgetter("slowdown"))[len(each) // 2]


def _repeating(engine: Engine, number: int, half: int, answer: int) -> Iterator[Request]:
    """Requests with prompts that repeat `half` tokens once, which lookups find, and with answers of
    several lengths up to `answer`, so that they end one by one."""
    half, tokens = min(half, engine.max_length // 8), min(answer, engine.max_length // 4)
    for first in range(number):
        phrase = tuple((first + 7 * place) % engine.vocab_size for place in range(half))
        yield Request(str(first), phrase * 2, max(tokens - 3 * (first % 5), 2), ignore_eos=True)


def step_times(
    pair: PairSpec, path: Path, slots: int = SLOTS, observer: Observer | None = None
) -> StepTimes:
    """The pair's step times on this machine: those in the file `path`, or, where it is missing,
    measured now and written to it. Raises :class:`UserError` for a file that lacks a draft, or is
    of another pair, of other weights, of another machine or of fewer slots."""
    if path.exists():
        times = load_step_times(path, list(pair.drafts))
        other = times.foreign_to(pair, slots, _weights(pair), machine())
        if other is not None:
            raise UserError(f"{path}: step times of {other}; delete it to measure again")
        return times
    observer = observer or Observer()
    observer.stage(f"loading {pair.name}")
    times = measure_steps(load_pair(pair), slots, observer=observer).times
    times.save(path)
    return times


def _weights(pair: PairSpec) -> dict[str, str]:
    """The fingerprints of the models, none where they are not here: a simulation needs none."""
    try:
        return fingerprints(pair)
    except UserError:
        return {}
