"""The profile of a server: the times of its whole steps, split into what they consist of."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from specdec_core.base.errors import UserError
from specdec_core.cost import ForwardCost, Measurement, Profile, draft_key
from specdec_core.cost.fitting import nonnegative_line
from specdec_core.models.pair import Pair

# Modes: without a drafter, and with a lookup. Other modes have the name of their draft.
PLAIN, NGRAM, SUFFIX = "\0plain", "prompt_lookup", "suffix"  # no draft's names
_LEAST = 1e-6  # seconds of what takes some

# Seconds of whole steps by rows, context and length.
Steps = dict[tuple[int, int, int], float]
# Seconds of prefills, by mode and tokens.
Prompts = dict[str, dict[int, float]]


LENGTHS = (1, 2, 4, 7)  # of a draft's chain; a step of all these is measured in every shape
CONTEXTS = (64, 256, 512)
BATCHES = (1, 4)
PROMPTS = (32, 128, 384)  # tokens of a prompt


def fitting_contexts(reached: Mapping[int, int], growth: int, max_length: int) -> list[int]:
    """The contexts that fit, in order, by the tokens that sequences have `reached` at each when it
    is measured; they grow by `growth`. Raises :class:`UserError` where none fits."""
    fitting = sorted(context for context, most in reached.items() if most <= max_length)
    if not fitting:
        raise UserError(
            f"profile contexts: sequences of {min(reached)} tokens grow by {growth} while they are"
            f" measured, which is more than the {max_length} that the pair can hold"
        )
    return fitting


def shapes(
    contexts: Sequence[int], batches: Sequence[int], ends: Sequence[int]
) -> list[tuple[int, int]]:
    """The contexts and rows to measure: the middle context, which is the first, with all rows; the
    other contexts only with the rows `ends`, because a step's time grows evenly with its
    context."""
    middle = contexts[len(contexts) // 2]
    others = [context for context in contexts if context != middle]
    return [*product([middle], batches), *product(others, sorted({*ends}))]


def keep_least(times: dict[Any, float], key: object, seconds: float) -> None:
    times[key] = min(seconds, times.get(key, seconds))


def assembled(
    pair: Pair,
    steps: dict[str, Steps],
    prompts: Prompts,
    overhead: float,
    version: str,
    ahead: bool = True,
) -> Profile:
    """The profile of measured `steps` and `prompts`, by mode. `ahead`: the server drafts whole
    chains after every step, also after a prompt and where the sequence ends sooner."""
    steps = dict(steps)
    plain, lookup = steps.pop(PLAIN), steps.pop(NGRAM)
    proposals = {NGRAM: _beyond(lookup, plain)}
    if SUFFIX in steps:
        proposals[SUFFIX] = _beyond(steps.pop(SUFFIX), plain)
    verifying = {shape: s - proposals[NGRAM] for shape, s in lookup.items() if shape[2]}
    target = [
        Measurement(width=1 + length, context=context, batch=rows, seconds=seconds - overhead)
        for (rows, context, length), seconds in {**plain, **verifying}.items()
    ]
    prefills = prompts.get(PLAIN, {})
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
        # The candidate that a draft model proposes after a prompt is no part of its prefill.
        own = {
            tokens: max(
                seconds - prefills[tokens] - ahead * (once + cost.seconds(1, tokens)), _LEAST
            )
            for tokens, seconds in prompts.get(draft, {}).items()
        }
        drafts[draft] = cost.with_prefill(own) if own else cost
    runner, target_cost = pair.spec.runner, ForwardCost.fit(target).in_steps()
    if prefills:
        beyond = {tokens: seconds - overhead for tokens, seconds in prefills.items()}
        target_cost = target_cost.with_prefill(beyond)
    return Profile(
        target=target_cost,
        drafts=drafts,
        device=f"{runner.device}, {version}",
        target_dtype=runner.target_dtype,
        draft_dtype=runner.target_dtype,  # a server gives a draft its target's
        threads=runner.threads,
        round_overhead=overhead,
        proposals=proposals,
        whole_chains=ahead,
    )


def _beyond(steps: Steps, plain: Steps) -> float:
    """What a step without candidates takes longer than an autoregressive one, for one row."""
    more = [steps[shape] - seconds for shape, seconds in plain.items() if shape[0] == 1]
    return max(statistics.median(more), 0.0)


def _line(chains: Steps, rows: int, context: int) -> tuple[float, float]:
    """The seconds of chains as `once` + `each` · length, neither negative."""
    lengths = [length for r, c, length in chains if (r, c) == (rows, context)]
    seconds = [max(chains[rows, context, length], 0.0) for length in lengths]
    once, each = nonnegative_line(lengths, seconds)
    return once, max(each, _LEAST)
