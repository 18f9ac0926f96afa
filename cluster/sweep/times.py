"""Interleaved times of configurations on the same requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from specdec_core.config import Configuration
from specdec_core.engine import Request
from specdec_core.measure.comparison import interleaved
from specdec_core.search.results import Timing, for_as_many_tokens, timed_together
from specdec_core.tokens.statistics import Generation, Ratio, paired_ratio


class Timer(Protocol):
    """Decodes requests alone, one after the other, under one configuration or another."""

    def prepare(self, configurations: Sequence[Configuration], request: Request) -> None:
        """Run each configuration for a moment, untimed."""

    def decode(self, configuration: Configuration, request: Request) -> tuple[float, Generation]:
        """Seconds and output of a request; a drafter keeps what it learns from it."""

    def forget(self) -> None:
        """Drop everything that drafters have learned."""


def in_turn(
    timer: Timer, configurations: Sequence[Configuration], request: Request, turn: int
) -> Iterator[tuple[Configuration, float, Generation]]:
    """Seconds and output of `request` under every configuration. The first configuration changes
    with the turn, so that none always runs after the same one."""
    for configuration in interleaved(configurations, turn):
        yield configuration, *timer.decode(configuration, request)


@dataclass
class InterleavedTimes:
    """Interleaved times of some configurations: seconds [repeat][prompt] and the generations
    [prompt] of the first repeat, by configuration id. `passes` numbers the pass over the prompts of
    each repeat, where some configurations were not timed in all passes."""

    seconds: dict[str, list[list[float]]] = field(default_factory=dict)
    generations: dict[str, list[Generation]] = field(default_factory=dict)
    passes: dict[str, list[int]] = field(default_factory=dict)

    def outputs(self, configuration: Configuration) -> list[list[int]]:
        """The outputs of `configuration`: tokens [prompt][position]."""
        return [generation.tokens for generation in self.generations[configuration.id]]

    def timing(self, configuration: Configuration, baseline: Configuration) -> Timing:
        """The timing of `configuration`, as a speedup over `baseline`."""
        outputs = self.outputs(configuration)
        seconds = np.array(self.seconds[configuration.id])
        tokens = [len(output) for output in outputs]
        if configuration == baseline:
            ratio = Ratio(1.0, 1.0, 1.0)
        else:
            ratio = self.compare(baseline, configuration)
        differing = 0
        if configuration.sampling.greedy:
            pairs = zip(outputs, self.outputs(baseline), strict=True)
            differing = sum(output != expected for output, expected in pairs)
        return Timing(
            config_id=configuration.id,
            seconds=seconds.tolist(),
            passes=self.passes.get(configuration.id, []),
            tokens=tokens,
            reading=self._prefill_seconds(configuration),
            speedup=ratio.value,
            low=ratio.low,
            high=ratio.high,
            tokens_per_second=sum(tokens) / float(np.median(seconds, axis=0).sum()),
            differing_outputs=differing,
        )

    def compare(self, baseline: Configuration, candidate: Configuration) -> Ratio:
        """The speedup of `candidate`. Where outputs differ in length (sampling, or a flipped
        near-tie), its times are scaled to the baseline's number of tokens."""
        written, wanted = (
            [len(output) for output in self.outputs(c)] for c in (candidate, baseline)
        )
        before, after = timed_together(
            *(self.seconds[baseline.id], self.passes.get(baseline.id, [])),
            *(self.seconds[candidate.id], self.passes.get(candidate.id, [])),
        )
        prefill = self._prefill_seconds(candidate)
        return paired_ratio(before, for_as_many_tokens(after, prefill, written, wanted))

    def _prefill_seconds(self, configuration: Configuration) -> list[float]:
        """Seconds to the first token [prompt]."""
        return [g.prefill_seconds for g in self.generations[configuration.id]]
