"""The profile of vLLM: the times of its steps with a pair.

Every way to draft has a process that runs during the whole measurement. The measurements are
interleaved, so that a change of the machine's load affects all ways alike. Of several laps the
least time counts, because load only adds to it. A process measures all lengths, because the length
can be set before each step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import DrafterSettings
from specdec_core.cost import ForwardCost, Measurement, Profile, draft_key
from specdec_core.cost.fitting import nonnegative_line
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.models.pair import Pair
from specdec_core.servers.model_files import models_of
from specdec_core.servers.server import Mode, Server
from specdec_core.servers.vllm.process import VllmProcess, has_suffix
from specdec_core.servers.vllm.settings import METHODS, TOKENS, any_load

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
# Seconds of prefills, by mode and tokens.
Prompts = dict[str, dict[int, float]]


def profile_vllm(
    server: Server,
    pair: Pair,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] = BATCHES,
    repeats: int = 7,
    observer: Observer | None = None,
) -> Profile:
    """What steps of vLLM with this pair take, as a profile.

    The time of a target's forward is that of a step without `round_overhead`. It includes sampling
    and scheduling, as far as these grow with rows and tokens. `proposals` has the time of a lookup,
    and the part of a chain's time that does not depend on its length.

    Raises:
        UserError: vLLM is not there or does not run, or sizes do not fit.
    """
    observer = observer or Observer()
    contexts, batches = contexts or CONTEXTS, sorted({*batches, 1})
    widths = sorted({1, *widths, *(1 + length for length in LENGTHS)})
    contexts = _checked(contexts, len(widths) * (repeats + 4), pair.max_length)
    modes = _modes(server, pair, max(widths) - 1)
    observer.stage("starting vLLM in its modes", len(modes))
    with ExitStack() as opened:
        peers = {name: VllmProcess(pair, mode, max(batches)) for name, mode in modes.items()}
        for peer in peers.values():
            opened.callback(peer.close)
            peer.open()
            observer.step()
        steps: dict[str, Steps] = {name: {} for name in peers}
        prompts: Prompts = {name: {} for name in peers if name not in (_NGRAM, _SUFFIX)}
        rest: list[float] = []  # seconds of a step beyond its forward
        shapes = list(product(contexts, batches))
        observer.stage("measuring steps", LAPS * len(shapes) * len(peers))
        for _, (context, rows), name in product(range(LAPS), shapes, peers):
            lengths, forced = _lengths(name, widths), name in (_NGRAM, _SUFFIX)
            shape = {"rows": rows, "context": context, "lengths": lengths}
            times = peers[name].call("measure", **shape, repeats=repeats, forced=forced)
            for length, taken in zip(lengths, times, strict=True):
                _keep_least(steps[name], (rows, context, length), taken["step"])
            if name == _PLAIN and rows == 1:
                rest.append(times[0]["step"] - times[0]["forward"])
            observer.step()
        fitting = [tokens for tokens in PROMPTS if tokens + 2 <= pair.max_length]
        observer.stage("measuring prefills", LAPS * len(fitting) * len(prompts))
        for _, tokens, name in product(range(LAPS), fitting, prompts):
            seconds = peers[name].call("prefill", tokens=tokens, repeats=repeats)
            _keep_least(prompts[name], tokens, seconds)
            observer.step()
        version = peers[_PLAIN].version
    return assembled(pair, steps, prompts, min(rest), version)


def _keep_least(times: dict[Any, float], key: object, seconds: float) -> None:
    times[key] = min(seconds, times.get(key, seconds))


def _checked(contexts: Sequence[int], growth: int, max_length: int) -> list[int]:
    """The contexts that fit, in order, if rows grow by `growth` tokens."""
    fitting = sorted({context for context in contexts if context + growth <= max_length})
    if not fitting:
        raise UserError(
            f"profile contexts: sequences of {min(contexts)} tokens grow by {growth} while they are"
            f" measured, which is more than the {max_length} that the pair can hold"
        )
    return fitting


def _modes(server: Server, pair: Pair, most: int) -> dict[str, Mode]:
    """vLLM's ways to draft, by their keys: a draft's is its name."""
    models = models_of(pair.spec, server.heads, dtype=pair.target.dtype)
    drafters: dict[str, DrafterSettings | None] = {
        name: DraftModelSettings(draft=name, policy=FixedSettings())
        for name, draft in models.drafts.items()
        if draft.kind in METHODS
    }
    drafters[_NGRAM] = PromptLookupSettings(min_ngram=2, max_ngram=4)
    modes = {_PLAIN: Mode("vLLM", {})}
    for mode in server.compared(drafters, models):
        told = {**mode.settings, TOKENS: most if mode.name == _NGRAM else max(LENGTHS)}
        modes[mode.name] = replace(mode, name=f"vLLM {mode.name}", settings=any_load(told))
    if has_suffix():
        modes[_SUFFIX] = Mode("vLLM suffix", {"method": "suffix", TOKENS: most})
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
    prefills = prompts.get(_PLAIN, {})
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
            tokens: max(seconds - prefills[tokens] - once - cost.seconds(1, tokens), _LEAST)
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
    once, each = nonnegative_line(lengths, seconds)
    return once, max(each, _LEAST)
