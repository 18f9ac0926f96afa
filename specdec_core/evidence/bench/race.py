"""All contestants decode the same prompts, interleaved and timed."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Protocol

from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.drafter import Drafter
from specdec_core.engine import Engine, Request
from specdec_core.evidence.bench.result import BenchRow, Effort, Take
from specdec_core.evidence.parts import Parts
from specdec_core.measure.comparison import OURS, interleaved
from specdec_core.prompts.conversation import Conversation
from specdec_core.servers.peer import Peer
from specdec_core.tokens.statistics import Generation, Round

# Fields of :class:`specdec_core.tokens.statistics.Round` in seconds; together the round's time.
PARTS_OF_A_ROUND = ("target_forward", "draft_forward", "policy", "verify", "bookkeeping")
FEW = 4  # prompts of a further warm-up


class DecodedOnce(NamedTuple):
    """New tokens; how many each forward of the target added, where known; and the generation with
    its rounds, where it is this engine's."""

    tokens: list[int]
    steps: list[int] | None = None
    generation: Generation | None = None


class BenchContestant(Protocol):
    """A way to decode a prompt."""

    def row(self, temperature: float) -> BenchRow:
        """A row that describes it, with no takes yet."""
        ...

    def begin(self) -> None:
        """A repeat begins: forget everything learned from earlier prompts."""
        ...

    def decode(
        self, tokens: Sequence[int], new_tokens: int, sampling: Sampling, seed: int
    ) -> DecodedOnce:
        """Decode one prompt."""
        ...


@dataclass
class EngineContestant:
    """This engine under one configuration; its sampling is the race's. Its drafter learns from
    prompt to prompt until the repeat ends."""

    engine: Engine
    configuration: Configuration
    version: str
    name: str = ""  # of its row; unset, the configuration's label
    _drafters: dict[Configuration, Drafter | None] | None = None

    def row(self, temperature: float) -> BenchRow:
        drafter = self.configuration.drafter
        return BenchRow(
            name=self.name or self.configuration.without_sampling,
            group=OURS,
            temperature=temperature,
            autoregressive=drafter is None,
            lossless=self.configuration.lossless,
            version=self.version,
            settings=self.configuration.model_dump(mode="json", exclude_defaults=True),
            configuration=self.configuration,
        )

    def begin(self) -> None:
        self._drafters = {}

    def decode(
        self, tokens: Sequence[int], new_tokens: int, sampling: Sampling, seed: int
    ) -> DecodedOnce:
        configuration = self.configuration.model_copy(update={"sampling": sampling})
        known = self._drafters or {}
        self.engine.configure(configuration, known.get(configuration))
        if self._drafters is not None:
            self._drafters[configuration] = self.engine.drafter
        request = Request("bench", tuple(tokens), new_tokens, seed=seed)
        (generation,) = self.engine.generate([request])
        return DecodedOnce(generation.tokens, [r.generated for r in generation.rounds], generation)


@dataclass
class PeerContestant:
    """An open peer of the library `group`, in its autoregressive or another mode."""

    peer: Peer
    group: str
    autoregressive: bool

    def row(self, temperature: float) -> BenchRow:
        return BenchRow(
            name=self.peer.name,
            group=self.group,
            temperature=temperature,
            autoregressive=self.autoregressive,
            with_ours=self.peer.with_ours,
            version=self.peer.version,
            settings=dict(self.peer.settings),
        )

    def begin(self) -> None:
        self.peer.forget()

    def decode(
        self, tokens: Sequence[int], new_tokens: int, sampling: Sampling, seed: int
    ) -> DecodedOnce:
        output = self.peer.decode(tuple(tokens), new_tokens, sampling.temperature, seed)
        return DecodedOnce(output, self.peer.steps)


@dataclass
class WarmUp:
    """Contestants decode before a clock runs: all prompts, because each may have a new size for a
    compiler, and a few prompts before a further race, in which only the sampling is new."""

    contestants: Sequence[BenchContestant]
    prompts: Sequence[Conversation]
    new_tokens: int
    _met: bool = False

    def __call__(self, sampling: Sampling) -> None:
        for contestant in self.contestants:
            contestant.begin()
            for prompt in self.prompts[: FEW if self._met else None]:
                contestant.decode(prompt.tokens(), self.new_tokens, sampling, 0)
        self._met = True
        gc.collect()


def race(
    contestants: Sequence[BenchContestant],
    prompts: Sequence[Conversation],
    new_tokens: int,
    sampling: Sampling,
    repeats: int,
    on_take: Callable[[], None] = lambda: None,
    on_repeat: Callable[[list[BenchRow]], None] = lambda rows: None,
    parts: Parts[Take] | None = None,
    first_turn: int = 0,
    warm_up: WarmUp | None = None,
) -> list[BenchRow]:
    """All contestants decode a prompt before the next one comes, each time another one first, so
    that the machine's load falls on all alike. After every repeat `on_repeat` is called with the
    rows so far, while no clock runs. Repeats that are in `parts` are not made again, and those that
    are made are kept in it, as turns from `first_turn` on. Races of the same contestants on the
    same prompts may share a `warm_up`."""
    warm_up = warm_up or WarmUp(contestants, prompts, new_tokens)
    rows = [contestant.row(sampling.temperature) for contestant in contestants]
    warm = False
    for repeat in range(repeats):
        kept = [parts.get(first_turn + repeat, row) if parts else None for row in rows]
        if all(kept):
            for row, takes in zip(rows, kept, strict=True):
                row.takes.append(takes or [])
                for _ in prompts:
                    on_take()
            on_repeat(rows)
            continue
        if not warm:
            warm_up(sampling)
            warm = True
        for contestant, row in zip(contestants, rows, strict=True):
            contestant.begin()
            row.takes.append([])
        for number, prompt in enumerate(prompts):
            turn = repeat * len(prompts) + number
            for index in interleaved(range(len(contestants)), turn):
                taken = take(contestants[index], prompt, new_tokens, sampling, seed=turn)
                if taken.steps is None and rows[index].autoregressive:
                    taken.steps = [[1] * len(output) for output in taken.outputs]
                rows[index].takes[repeat].append(taken)
                on_take()
        if parts is not None:
            for row in rows:
                parts.keep(first_turn + repeat, row, row.takes[repeat])
        on_repeat(rows)
    return rows


def take(
    contestant: BenchContestant,
    prompt: Conversation,
    new_tokens: int,
    sampling: Sampling,
    seed: int,
) -> Take:
    """Every turn of a prompt; only the decoding is timed."""
    seconds: list[float] = []
    turns: list[DecodedOnce] = []
    answers: list[str] = []
    for _ in range(prompt.turns):
        tokens = prompt.tokens(answers)
        start = perf_counter()
        turns.append(contestant.decode(tokens, new_tokens, sampling, seed))
        seconds.append(perf_counter() - start)
        answers.append(prompt.answer(turns[-1].tokens) if prompt.turns > 1 else "")
    generations = [turn.generation for turn in turns if turn.generation is not None]
    steps = [turn.steps for turn in turns if turn.steps is not None]
    # The first round of each is its prefill.
    rounds = [r for generation in generations for r in generation.rounds[1:]]
    return Take(
        seconds=seconds,
        outputs=[turn.tokens for turn in turns],
        steps=steps or None,
        effort=_effort(generations, rounds) if generations else None,
    )


def _effort(generations: Sequence[Generation], rounds: Sequence[Round]) -> Effort:
    seconds = {
        name: sum(getattr(r, f"{name}_seconds") for r in rounds) for name in PARTS_OF_A_ROUND
    }
    return Effort(
        seconds={"prefill": sum(g.prefill_seconds for g in generations), **seconds},
        widths=dict(Counter(1 + r.drafted for r in rounds)),
        draft_forwards=sum(r.draft_forwards for r in rounds),
        draft_tokens=sum(r.draft_tokens for r in rounds),
    )
