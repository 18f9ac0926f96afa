"""All contestants decode the same prompts, interleaved and timed."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple, Protocol

from specdec_core.base.observer import SILENT, Observer
from specdec_core.config import Configuration, Sampling
from specdec_core.drafting.drafter import Drafter
from specdec_core.engine import Engine, Request
from specdec_core.evidence.bench.result import PARTS_OF_A_ROUND, BenchRow, Take
from specdec_core.measure.comparison import OURS, interleaved
from specdec_core.measure.losses import again_if_lost
from specdec_core.measure.parts import Parts
from specdec_core.prompts.conversation import Conversation
from specdec_core.servers.peer import Peer
from specdec_core.tokens.statistics import Generation

FEW = 4  # prompts of the warm-up before a further sampling


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

    def begin(self) -> None:
        """A repeat begins: forget everything learned from earlier prompts."""

    def decode(
        self, tokens: Sequence[int], new_tokens: int, sampling: Sampling, seed: int
    ) -> DecodedOnce:
        """Decode one prompt."""


@dataclass
class EngineContestant:
    """This engine under one configuration; its sampling is the race's. Its drafter learns from
    prompt to prompt until the repeat ends."""

    engine: Engine
    configuration: Configuration
    version: str
    name: str = ""  # of its row; unset, the configuration's label
    _drafter: Drafter | None = None  # of the repeat

    def row(self, temperature: float) -> BenchRow:
        return BenchRow(
            name=self.name or self.configuration.without_sampling,
            group=OURS,
            temperature=temperature,
            autoregressive=self.configuration.drafter is None,
            lossless=self.configuration.lossless,
            version=self.version,
            settings=self.configuration.model_dump(mode="json", exclude_defaults=True),
            configuration=self.configuration,
        )

    def begin(self) -> None:
        self._drafter = None
        self.engine.configure(self.configuration)
        self.engine.wait_for_draft()

    def decode(
        self, tokens: Sequence[int], new_tokens: int, sampling: Sampling, seed: int
    ) -> DecodedOnce:
        configuration = self.configuration.model_copy(update={"sampling": sampling})
        request = Request("bench", tuple(tokens), new_tokens, seed=seed)
        with self.engine.pair.undisturbed():
            self.engine.configure(configuration, self._drafter)
            self._drafter = self.engine.drafter
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


def race(
    contestants: Sequence[BenchContestant],
    prompts: Sequence[Conversation],
    new_tokens: int,
    samplings: Sequence[Sampling],
    repeats: int,
    observer: Observer = SILENT,
    parts: Parts[Take] | None = None,
) -> list[BenchRow]:
    """All contestants decode a prompt before the next prompt comes, each time in another order, so
    that the machine's load falls on all alike. Returns a row for each sampling and contestant.
    Repeats that are in `parts` are not made again; those that are made are kept in it."""

    def warm_up(texts: Sequence[Conversation], sampling: Sampling) -> None:
        for contestant in contestants:
            contestant.begin()
            for prompt in texts:
                contestant.decode(prompt.tokens(), new_tokens, sampling, 0)
        gc.collect()

    def timed(rows: Sequence[BenchRow], sampling: Sampling, repeat: int) -> list[list[Take]]:
        """The takes of a repeat, by row."""
        takes: list[list[Take]] = [[] for _ in rows]
        for contestant in contestants:
            contestant.begin()
        for number, prompt in enumerate(prompts):
            turn = repeat * len(prompts) + number
            for index in interleaved(range(len(contestants)), turn):
                taken = take(contestants[index], prompt, new_tokens, sampling, seed=turn)
                if taken.steps is None and rows[index].autoregressive:
                    taken.steps = [[1] * len(output) for output in taken.outputs]
                takes[index].append(taken)
                observer.step()
        return takes

    # Each prompt may have a new size for a compiler.
    unseen, every_row = prompts, list[BenchRow]()
    for number, sampling in enumerate(samplings):
        at = f" at temperature {sampling.temperature:g}" if len(samplings) > 1 else ""
        steps = len(contestants) * len(prompts) * repeats
        observer.stage(f"{len(contestants)} contestants, interleaved{at}", steps)
        rows = [contestant.row(sampling.temperature) for contestant in contestants]
        warm = False
        for repeat in range(repeats):
            turn = number * repeats + repeat
            kept = [parts.get(f"{turn}-{row.key}") if parts else None for row in rows]
            if all(kept):
                for row, takes in zip(rows, kept, strict=True):
                    row.takes.append(takes or [])
                    for _ in prompts:
                        observer.step()
                continue
            if not warm:
                again_if_lost(partial(warm_up, unseen, sampling), observer)
                # Only the sampling is new in a further race.
                warm, unseen = True, prompts[:FEW]
            made = again_if_lost(partial(timed, rows, sampling, repeat), observer)
            for row, takes in zip(rows, made, strict=True):
                row.takes.append(takes)
                if parts is not None:
                    parts.keep(f"{turn}-{row.key}", takes)
        every_row += rows
    return every_row


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
    return Take(
        seconds=seconds,
        outputs=[turn.tokens for turn in turns],
        steps=steps or None,
        parts=_parts(generations) if generations else None,
    )


def _parts(generations: Sequence[Generation]) -> dict[str, float]:
    rounds = [r for g in generations for r in g.rounds[1:]]  # the first of each is its prefill
    return {
        "prefill": sum(g.prefill_seconds for g in generations),
        **{name: sum(getattr(r, f"{name}_seconds") for r in rounds) for name in PARTS_OF_A_ROUND},
    }
