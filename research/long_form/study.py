"""Speculative decoding along a long text: speed and accepted tokens by context (SVIP, Fig. 5 and
Table 5).

Every configuration writes texts that fill the context, each round is put down where its text stood,
and texts are cut into ranges of context. Sampling is coupled: a text depends on the target, its
prompt and its seed alone, so that all configurations write the same one (in float32; elsewhere
near-ties may part them) and a range compares like with like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd
from pydantic import PositiveInt

from research.frames import Rows, framed
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import (
    AUTOREGRESSIVE,
    Configuration,
    Sampling,
    Temperature,
    distinct_labels,
)
from specdec_core.engine import Engine, Request
from specdec_core.evidence.bench.benchmark import BenchPlan
from specdec_core.measure.comparison import interleaved
from specdec_core.measure.paired import UNKNOWN, paired_ratio
from specdec_core.models.pair import Pair
from specdec_core.prompts.source import PromptSource
from specdec_core.tokens.statistics import rounds_frame

EDGES = (128, 256, 512, 1024, 2048, 4096, 8192)
LEAST = 6  # texts; of fewer, hardly two draws of texts differ, and an interval says nothing
_WARM_UP = 32

Tokens = tuple[int, ...]


class LongFormPlan(BenchPlan):
    """What to measure: the benchmark's rows at one temperature, on a few prompts, up to the last of
    `contexts`, which end the ranges; unset, :func:`ranges_for` the pair. No peers take part."""

    prompts: PromptSource = PromptSource(limit=2)
    repeats: PositiveInt = 1
    temperatures: tuple[Temperature] = (1.0,)
    peers: tuple[()] = ()
    contexts: tuple[PositiveInt, ...] = ()


@dataclass(frozen=True)
class LongForm:
    """What was decoded. `rounds` has a row a round: `configuration` (its label), `text`, `repeat`,
    `context` (tokens before the round) and :class:`specdec_core.tokens.statistics.Round`'s fields.
    `edges` end the ranges of context."""

    configurations: list[Configuration]
    rounds: pd.DataFrame
    edges: tuple[int, ...]

    @property
    def labels(self) -> list[str]:
        """The configurations' labels, autoregressive decoding's first."""
        return list(distinct_labels(self.configurations).values())

    @framed
    def table(self) -> Rows:
        """A row a range of context (`up_to`) and `configuration`: `tokens`, `mat`, and how many
        times as fast as autoregressive decoding it is from a text's beginning to the range's end:
        `so_far`, with its 95 % interval over texts and repeats (`so_far_low`, `so_far_high`), NaN
        of fewer than :data:`LEAST` texts. Ranges that a configuration did not reach in every text
        are left out."""
        cut = self._in_ranges()
        base, texts = self.labels[0], cut["text"].nunique()
        for number, edge in enumerate(self.edges):
            for label in self.labels:
                if not (_whole(cut, label, number) and _whole(cut, base, number)):
                    continue
                rounds = cut[(cut["configuration"] == label) & (cut["range"] == number)]
                tokens = rounds["generated"].sum()
                so_far = paired_ratio(_pace(cut, base, number), _pace(cut, label, number))
                interval = so_far if texts >= LEAST else UNKNOWN
                yield {
                    "up_to": edge,
                    "configuration": label,
                    "tokens": int(tokens),
                    "mat": tokens / len(rounds),
                    "so_far": so_far.value,
                    "so_far_low": interval.low,
                    "so_far_high": interval.high,
                }

    def _in_ranges(self) -> pd.DataFrame:
        """The rounds with their `seconds`, and the number of the `range` that each begins in."""
        rounds, last = self.rounds, len(self.edges) - 1
        seconds = rounds[["draft_seconds", "target_seconds", "other_seconds"]].sum(axis=1)
        number = np.searchsorted(self.edges, rounds["context"].to_numpy(), side="right")
        return rounds.assign(range=number.clip(max=last), seconds=seconds)


def ranges_for(max_length: int, prompts: Sequence[Tokens]) -> tuple[int, ...]:
    """The ends of :data:`EDGES` that lie between the longest prompt and what a pair holds, which is
    the last end."""
    longest = max(map(len, prompts))
    return (*(edge for edge in EDGES if longest < edge < max_length), max_length)


def measure_long_form(
    pair: Pair,
    configurations: Sequence[Configuration],
    prompts: Sequence[Tokens],
    edges: Sequence[int],
    temperature: float = 1.0,
    repeats: int = 1,
    observer: Observer | None = None,
) -> LongForm:
    """Let autoregressive decoding and each of `configurations` continue `prompts`, interleaved,
    until the last of `edges` tokens are in the context, whatever ends the text before.

    Raises:
        UserError: the pair holds less, or a prompt is as long as the first range.
    """
    edges = tuple(sorted(set(edges)))
    if edges[-1] > pair.max_length:
        raise UserError(
            f"a context of {edges[-1]} tokens is more than the {pair.max_length} that the pair"
            " holds (--max-length, up to what its models do)"
        )
    if (longest := max(map(len, prompts))) >= edges[0]:
        raise UserError(
            f"a prompt has {longest} tokens: expected fewer than the end of the first range of"
            f" context, {edges[0]}"
        )
    sampling = Sampling(temperature=temperature, coupling="gumbel" if temperature else "rejection")
    asked = [AUTOREGRESSIVE, *configurations]
    sampled = [c.model_copy(update={"sampling": sampling}) for c in asked]
    everyone = list({c.id: c for c in sampled}.values())
    labels = distinct_labels(everyone)
    engine, observer = Engine(pair), observer or Observer()
    for configuration in everyone:
        engine.configure(configuration)
        engine.generate([Request("warm-up", prompts[0], _WARM_UP, ignore_eos=True)])
    turns = list(product(range(repeats), enumerate(prompts)))
    stage = f"{len(everyone)} configurations, interleaved"
    observer.stage(stage, len(turns) * len(everyone))
    frames = []
    for turn, (repeat, (text, prompt)) in enumerate(turns):
        request = Request("text", prompt, edges[-1] - len(prompt), seed=text, ignore_eos=True)
        for configuration in interleaved(everyone, turn):
            engine.configure(configuration)
            [generation] = engine.generate([request])
            rounds = rounds_frame([generation]).iloc[1:]  # the first is the prefill
            context = generation.prompt_tokens + rounds["position"]
            label, where = labels[configuration.id], {"text": text, "repeat": repeat}
            frames.append(rounds.assign(context=context, configuration=label, **where))
            observer.step()
    return LongForm(everyone, pd.concat(frames), edges)


def _whole(cut: pd.DataFrame, label: str, number: int) -> bool:
    """Whether a configuration has rounds in the range of this number of every text."""
    mine = cut[(cut["configuration"] == label) & (cut["range"] == number)]
    ours, of_all = (rounds.groupby(["text", "repeat"]).ngroups for rounds in (mine, cut))
    return ours == of_all


def _pace(cut: pd.DataFrame, label: str, last: int) -> np.ndarray:
    """Seconds a token (repeats, texts) up to the end of the range of this number."""
    mine = cut[(cut["configuration"] == label) & (cut["range"] <= last)]
    sums = mine.groupby(["repeat", "text"])[["seconds", "generated"]].sum()
    pace = (sums["seconds"] / sums["generated"]).unstack("text")
    return np.asarray(pace.to_numpy(), dtype=float)
