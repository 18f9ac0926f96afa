"""Measuring what vLLM takes for a pair: the profile of another engine.

A process for each way to draft runs all the time. Their measurements are interleaved, so that a
change of the machine's load affects all ways alike. Of several laps the least time counts, because
a load only adds to it. A process measures all lengths, because the length can be set before each
step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import numpy as np

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.cost import ForwardCost, Measurement, Profile, draft_key
from specdec_core.cost.fitting import nonnegative_least_squares
from specdec_core.evidence.peers.vllm import (
    AUTOREGRESSIVE,
    VllmMode,
    VllmPeer,
    by_load,
    draft_modes,
    environment_folder,
    lookup_mode,
    suffix_modes,
)
from specdec_core.models.pair import Pair

WIDTHS = (*range(1, 10), 11, 12, 13, 17)  # tokens of a row in a step
CONTEXTS = (64, 256, 512)
BATCHES = (1, 4)
LAPS = 5
LENGTHS = (1, 2, 4, 7)  # of a draft's chain, one less than a width that is compared
PROMPTS = (32, 128, 384)  # tokens of a prompt
_PLAIN, _NGRAM, _SUFFIX = "\0plain", "prompt_lookup", "suffix"  # no draft's names
_LEAST = 1e-6  # seconds of what takes some

# Seconds of whole steps by rows, context and length.
Steps = dict[tuple[int, int, int], float]
# Seconds of the steps that read prompts, by mode and tokens.
Prompts = dict[str, dict[int, float]]


def profile_vllm(
    pair: Pair,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] = BATCHES,
    repeats: int = 7,
    observer: Observer | None = None,
    venv: Path | None = None,
) -> Profile:
    """What steps of vLLM with this pair take, as a profile.

    A target's forward is what a step takes beyond `round_overhead`, so it has in it what sampling
    and scheduling take for more rows and tokens. A lookup's time and what a draft's chain takes
    whatever its length are `proposals`.

    Raises:
        UserError: vLLM is not there or does not run, or sizes do not fit.
    """
    observer = observer or Observer()
    contexts, batches = contexts or CONTEXTS, sorted({*batches, 1})
    widths = sorted({1, *widths, *(1 + length for length in LENGTHS)})
    contexts = _checked(contexts, len(widths) * (repeats + 4), pair.max_length)
    modes = _modes(pair, max(widths) - 1, venv)
    observer.stage("starting vLLM in its modes", len(modes))
    with ExitStack() as opened:
        peers = {}
        for name, (mode, draft) in modes.items():
            peer = VllmPeer(pair, mode, draft, venv, requests=max(batches))
            peers[name] = opened.enter_context(peer)
            observer.step()
        steps: dict[str, Steps] = {name: {} for name in peers}
        prompts: Prompts = {}
        rest: list[float] = []  # seconds of a step beyond its forward
        shapes = list(product(contexts, batches))
        observer.stage("measuring steps", LAPS * len(shapes) * len(peers))
        for _, (context, rows), name in product(range(LAPS), shapes, peers):
            lengths, forced = _lengths(name, widths), name in (_NGRAM, _SUFFIX)
            times = peers[name].measure(rows, context, lengths, repeats, forced)
            for length, taken in zip(lengths, times, strict=True):
                least = steps[name].get((rows, context, length), math.inf)
                steps[name][rows, context, length] = min(taken["step"], least)
            if name == _PLAIN and rows == 1:
                rest.append(times[0]["step"] - times[0]["forward"])
            observer.step()
        readers = [name for name in peers if name not in (_NGRAM, _SUFFIX)]
        observer.stage("reading prompts", LAPS * len(PROMPTS) * len(readers))
        for _, tokens, name in product(range(LAPS), PROMPTS, readers):
            if tokens + 2 <= pair.max_length:
                least = prompts.setdefault(name, {}).get(tokens, math.inf)
                prompts[name][tokens] = min(peers[name].read(tokens, repeats), least)
            observer.step()
        version = peers[_PLAIN].version
    return assembled(pair, steps, prompts, min(rest), version)


def _checked(contexts: Sequence[int], growth: int, max_length: int) -> list[int]:
    """The contexts that fit, in order, if rows grow by `growth` tokens."""
    fitting = sorted({context for context in contexts if context + growth <= max_length})
    if not fitting:
        raise UserError(
            f"profile contexts: texts of {min(contexts)} tokens grow by {growth} while they are"
            f" measured, which is more than the {max_length} that the pair can hold"
        )
    return fitting


def _modes(pair: Pair, most: int, venv: Path | None) -> dict[str, tuple[VllmMode, str | None]]:
    modes: dict[str, tuple[VllmMode, str | None]] = {
        _PLAIN: (AUTOREGRESSIVE, None),
        _NGRAM: (by_load(lookup_mode(2, 4, most)), None),
    }
    if suffix_modes(venv or environment_folder()):
        settings = {"method": "suffix", "num_speculative_tokens": most}
        modes[_SUFFIX] = (VllmMode("vLLM suffix", settings), None)
    for draft, own in draft_modes(pair):
        modes[draft] = (by_load(own[-1].longer(max(LENGTHS))), draft)
    return modes


def _lengths(name: str, widths: Sequence[int]) -> list[int]:
    if name in (_PLAIN, _SUFFIX):
        return [0]
    return [width - 1 for width in widths] if name == _NGRAM else list(LENGTHS)


def assembled(
    pair: Pair, steps: dict[str, Steps], prompts: Prompts, overhead: float, version: str
) -> Profile:
    """The profile of measured `steps` and `prompts`, by mode."""
    steps = dict(steps)
    plain, lookup = steps.pop(_PLAIN), steps.pop(_NGRAM)
    proposals = {_NGRAM: _beyond(lookup, plain)}
    if _SUFFIX in steps:
        proposals[_SUFFIX] = _beyond(steps.pop(_SUFFIX), plain)
    verifying = {shape: s - proposals[_NGRAM] for shape, s in lookup.items() if shape[2]}
    target = [
        Measurement(width=1 + length, context=context, batch=rows, seconds=seconds - overhead)
        for (rows, context, length), seconds in {**plain, **verifying}.items()
    ]
    reading = prompts.get(_PLAIN, {})
    drafts: dict[str, ForwardCost] = {}
    for draft, taken in steps.items():
        chains = {shape: seconds - verifying[shape] for shape, seconds in taken.items()}
        forwards, begun = {}, []
        for rows, context in {shape[:2] for shape in chains}:
            once, each = _line(chains, rows, context)
            forwards[rows, context] = each
            if rows == 1:
                begun.append(once)
        once = proposals[draft_key(draft)] = statistics.median(begun)
        cost = ForwardCost.fit(
            [
                Measurement(width=1, context=context, batch=rows, seconds=seconds)
                for (rows, context), seconds in sorted(forwards.items())
            ]
        )
        # After a prompt a draft model proposes one candidate, too.
        own = {
            tokens: max(seconds - reading[tokens] - once - cost.seconds(1, tokens), _LEAST)
            for tokens, seconds in prompts.get(draft, {}).items()
        }
        drafts[draft] = cost.with_prefill(own) if own else cost
    runner, target_cost = pair.spec.runner, ForwardCost.fit(target).in_steps()
    if reading:
        beyond = {tokens: seconds - overhead for tokens, seconds in reading.items()}
        target_cost = target_cost.with_prefill(beyond)
    return Profile(
        target=target_cost,
        drafts=drafts,
        device=f"{pair.target.device}, {version}",
        target_dtype=runner.target_dtype,
        draft_dtype=runner.target_dtype,  # vLLM gives a draft its target's
        threads=runner.threads,
        round_overhead=overhead,
        proposals=proposals,
        whole_chains=True,
    )


def _beyond(steps: Steps, plain: Steps) -> float:
    """What a step without candidates takes longer than an autoregressive one, for one row."""
    more = [steps[shape] - seconds for shape, seconds in plain.items() if shape[0] == 1]
    return max(statistics.median(more), 0.0)


def _line(chains: Steps, rows: int, context: int) -> tuple[float, float]:
    """The seconds of chains as `once` + `each` · length, neither negative."""
    lengths = [length for r, c, length in chains if (r, c) == (rows, context)]
    seconds = [max(chains[rows, context, length], 0.0) for length in lengths]
    columns = np.column_stack([np.ones(len(lengths)), lengths])
    once, each = nonnegative_least_squares(columns, np.array(seconds))
    return float(once), max(float(each), _LEAST)
