"""The profile of vLLM: the times of its steps with a pair.

Every way to draft has a process that runs during the whole measurement. The measurements are
interleaved, so that a change of the machine's load affects all ways alike. Of several laps the
least time counts, because load only adds to it. A process measures all lengths, because the length
can be set before each step. All numbers of rows and lengths are measured at one context; what a
context costs, which is proportional to it, with the fewest and the most rows and few lengths.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from itertools import product

from specdec_core.base.errors import UserError
from specdec_core.base.observer import SILENT, Observer
from specdec_core.config import DrafterSettings
from specdec_core.cost import Profile
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.models.pair import Pair
from specdec_core.servers.model_files import models_in
from specdec_core.servers.server import Mode, Server
from specdec_core.servers.step_profile import (
    BATCHES,
    CONTEXTS,
    LENGTHS,
    NGRAM,
    PLAIN,
    PROMPTS,
    SUFFIX,
    Prompts,
    Steps,
    assembled,
    fitting_contexts,
    keep_least,
    shapes,
)
from specdec_core.servers.vllm.process import VllmPeer, has_suffix
from specdec_core.servers.vllm.settings import TOKENS, any_load

WIDTHS = (*range(1, 10), 11, 12, 13, 17)  # tokens of a row in a step
LAPS = 2
FEW_WIDTHS = (1, *(1 + length for length in LENGTHS))


def profile_vllm(
    server: Server,
    pair: Pair,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] = BATCHES,
    repeats: int = 5,
    observer: Observer = SILENT,
) -> Profile:
    """What steps of vLLM with this pair take, as a profile.

    The time of a target's forward is that of a step without `round_overhead`. It includes sampling
    and scheduling, as far as these grow with rows and tokens. `proposals` has the time of a lookup,
    and the part of a chain's time that does not depend on its length.

    A draft with which vLLM does not start is left out, with a warning.

    Raises:
        UserError: vLLM is not there or does not run, or sizes do not fit.
    """
    batches = sorted({*batches, 1})
    widths = sorted({1, *widths, *(1 + length for length in LENGTHS)})
    growth = len(widths) * (repeats + 4)
    reached = {context: context + growth for context in contexts or CONTEXTS}
    contexts = fitting_contexts(reached, growth, pair.max_length)
    modes = _modes(server, pair, max(widths) - 1)
    observer.stage("starting vLLM in its modes", len(modes))
    # On a CPU they compile side by side. On a GPU vLLM refuses memory that changes meanwhile.
    at_once = len(os.sched_getaffinity(0)) if pair.spec.runner.device == "cpu" else 1
    with ExitStack() as opened:
        pool = opened.enter_context(ThreadPoolExecutor(at_once))
        peers = {name: VllmPeer(pair, mode, max(batches)) for name, mode in modes.items()}
        for peer in peers.values():
            opened.callback(peer.close)
        starts = {pool.submit(peer.open): name for name, peer in peers.items()}
        # At an error these come first; the pool would wait until all have started.
        opened.callback(lambda: [start.cancel() for start in starts])
        for start in as_completed(starts):
            try:
                start.result()
            except UserError as error:
                if (name := starts[start]) in (PLAIN, NGRAM):
                    raise
                del peers[name]
                observer.warned(f"no step costs of {name}: {error}")
            observer.step()
        steps: dict[str, Steps] = {name: {} for name in peers}
        prompts: Prompts = {name: {} for name in peers if name not in (NGRAM, SUFFIX)}
        rest: list[float] = []  # seconds of a step beyond its forward
        measured = shapes(contexts, batches, ends=(min(batches), max(batches)))
        observer.stage("measuring steps", LAPS * len(measured) * len(peers))
        for _, (context, rows), name in product(range(LAPS), measured, peers):
            lengths = _lengths(name, widths if context == measured[0][0] else FEW_WIDTHS)
            forced = name in (NGRAM, SUFFIX)
            shape = {"rows": rows, "context": context, "lengths": lengths}
            times = peers[name].call("measure", **shape, repeats=repeats, forced=forced)
            for length, taken in zip(lengths, times, strict=True):
                keep_least(steps[name], (rows, context, length), taken["step"])
            if name == PLAIN and rows == 1:
                rest.append(times[0]["step"] - times[0]["forward"])
            observer.step()
        fitting = [tokens for tokens in PROMPTS if tokens + 2 <= pair.max_length]
        observer.stage("measuring prefills", LAPS * len(fitting) * len(prompts))
        for _, tokens, name in product(range(LAPS), fitting, prompts):
            seconds = peers[name].call("prefill", tokens=tokens, repeats=repeats)
            keep_least(prompts[name], tokens, seconds)
            observer.step()
        version = peers[PLAIN].version
    return assembled(pair, steps, prompts, min(rest), version)


def _modes(server: Server, pair: Pair, most: int) -> dict[str, Mode]:
    """vLLM's ways to draft, by their keys: a draft's is its name."""
    models = models_in(server, pair)
    drafters: dict[str, DrafterSettings | None] = {
        name: DraftModelSettings(draft=name, policy=FixedSettings()) for name in models.drafts
    }
    drafters[NGRAM] = PromptLookupSettings(min_ngram=2, max_ngram=4)
    modes = {PLAIN: Mode("vLLM", {})}
    for mode in server.compared(drafters, models):
        told = {**mode.settings, TOKENS: most if mode.name == NGRAM else max(LENGTHS)}
        modes[mode.name] = replace(mode, name=f"vLLM {mode.name}", settings=any_load(told))
    if has_suffix():
        modes[SUFFIX] = Mode("vLLM suffix", {"method": "suffix", TOKENS: most})
    return modes


def _lengths(name: str, widths: Sequence[int]) -> list[int]:
    if name in (PLAIN, SUFFIX):
        return [0]
    return [width - 1 for width in widths] if name == NGRAM else list(LENGTHS)
