"""Ways to decode the same prompts, timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import pandas as pd

from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.engine import Engine, Request
from specdec_core.pair import Pair
from specdec_core.peers import ASSISTED, TRANSFORMERS, TransformersMode, transformers_generate

Tokens = tuple[int, ...]
WARM_UP = 2  # prompts that everybody decodes before the clock runs


@dataclass
class Contestant:
    """A way to decode a prompt greedily; its seconds [repeat][prompt] and outputs [prompt]."""

    label: str
    ours: bool
    decode: Callable[[Tokens], list[int]]
    seconds: list[list[float]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def seconds_per_token(self) -> np.ndarray:
        """Shape (repeats, prompts)."""
        return np.array(self.seconds) / np.array([len(output) for output in self.outputs])

    @property
    def tokens_per_second(self) -> float:
        return float(1 / np.median(self.seconds_per_token, axis=0).mean())

    def differing(self, other: Contestant) -> int:
        """Prompts whose output is not the other's."""
        return sum(a != b for a, b in zip(self.outputs, other.outputs, strict=True))


def contestants(
    pair: Pair,
    peer_pair: Pair,
    configurations: Iterable[Configuration],
    new_tokens: int,
) -> list[Contestant]:
    """Our autoregressive decoding and `configurations` on `pair`, and transformers' `generate` in
    its modes, with every draft, on `peer_pair`: the same models as transformers loads them."""
    engine = Engine(pair)

    def ours(configuration: Configuration) -> Contestant:
        def decode(tokens: Tokens) -> list[int]:
            engine.configure(configuration)
            return engine.generate([Request("contest", tokens, new_tokens)])[0].tokens

        return Contestant(configuration.label, True, decode)

    def theirs(mode: TransformersMode, draft: str | None) -> Contestant:
        def decode(tokens: Tokens) -> list[int]:
            return transformers_generate(peer_pair, mode, draft, tokens, new_tokens)

        return Contestant(mode.label + (f", {draft}" if draft else ""), False, decode)

    return [
        *(ours(configuration) for configuration in (AUTOREGRESSIVE, *configurations)),
        theirs(TRANSFORMERS, None),
        *(theirs(mode, draft) for draft in peer_pair.drafts for mode in ASSISTED),
    ]


def race(
    runners: Sequence[Contestant],
    prompts: Sequence[Tokens],
    repeats: int,
    on_turn: Callable[[], None] = lambda: None,
) -> None:
    """Everybody decodes a prompt before the next prompt comes, and another one begins each time,
    so that what the machine does meanwhile meets all alike."""
    for runner in runners:
        for prompt in prompts[:WARM_UP]:
            runner.decode(prompt)
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            shift = (repeat * len(prompts) + number) % len(runners)
            for runner in [*runners[shift:], *runners[:shift]]:
                if number == 0:
                    runner.seconds.append([])
                start = perf_counter()
                output = runner.decode(prompt)
                runner.seconds[repeat].append(perf_counter() - start)
                if repeat == 0:
                    runner.outputs.append(output)
            on_turn()


def contest_frame(runners: Sequence[Contestant]) -> pd.DataFrame:
    """One row a contestant, repeat and prompt."""
    return pd.DataFrame(
        {
            "contestant": runner.label,
            "repeat": repeat,
            "prompt": prompt,
            "seconds": seconds,
            "tokens": len(runner.outputs[prompt]),
        }
        for runner in runners
        for repeat, row in enumerate(runner.seconds)
        for prompt, seconds in enumerate(row)
    )
