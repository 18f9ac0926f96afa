"""The profile of llama.cpp: the times of its server's steps with a pair, by the server's own clock.

An answer's `timings` have the time from its first token to its last. The number of candidates is
fixed when the server starts, so it starts once for each. Every candidate is accepted
(`--spec-synth-len`), so a step adds one token more than it has candidates. A lookup has all its
candidates in every step: what the target adds is always one and the same token, and the prompt
repeats a sequence behind that.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from specdec_core.base.errors import UserError
from specdec_core.base.observer import SILENT, Observer
from specdec_core.config import DrafterSettings
from specdec_core.cost import Profile
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.models.pair import Pair
from specdec_core.servers.completions import SILENCE
from specdec_core.servers.model_files import models_in
from specdec_core.servers.process import running
from specdec_core.servers.server import Mode, Server
from specdec_core.servers.step_profile import (
    BATCHES,
    CONTEXTS,
    LENGTHS,
    NGRAM,
    PLAIN,
    PROMPTS,
    Prompts,
    Steps,
    assembled,
    fitting_contexts,
    keep_least,
    shapes,
)

WIDTHS = (1, 2, 3, 5, 8, 13)  # tokens of a row in a step
STEPS = 8  # of an answer
ADDED = 5  # the token that the target adds


def profile_llama_cpp(
    server: Server,
    pair: Pair,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] = BATCHES,
    repeats: int = 3,
    observer: Observer = SILENT,
) -> Profile:
    """What steps of llama.cpp with this pair take, as a profile.

    The time of a target's forward is that of a whole step. `proposals` has the part of a chain's
    time that does not depend on its length.

    A draft that llama.cpp does not draft with is left out, with a warning.

    Raises:
        UserError: llama.cpp is not there or does not run, or sizes do not fit.
    """
    batches = sorted({*batches, 1})
    lookups = sorted({*widths, *(1 + length for length in LENGTHS)} - {1})
    widest, growth = max(lookups), 1 + STEPS * max(lookups)
    reached = {c: max(c - growth // 2, 2 * widest) + growth + 1 for c in contexts or CONTEXTS}
    contexts = fitting_contexts(reached, growth, pair.max_length)
    modes = _modes(server, pair, [width - 1 for width in lookups])
    steps: dict[str, Steps] = {name: {} for name, _ in modes}
    prompts: Prompts = {name: {} for name, _ in modes if name != NGRAM}
    fitting = [tokens for tokens in PROMPTS if tokens + 2 <= pair.max_length]
    # Rows at other contexts would take longer to read than to measure.
    measured = shapes(contexts, batches, ends=batches[:1])
    middle = measured[: len(batches)]
    observer.stage("measuring steps of llama.cpp", len(modes))
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        version = server.served(pair, modes[PLAIN, 0], (), folder).version
        for (name, length), mode in modes.items():
            if name not in steps:
                continue
            try:
                served = server.served(pair, mode, (), folder)
                with (
                    running(served.process(f"llama.cpp {name}", max(batches))) as url,
                    httpx.Client(base_url=url, timeout=SILENCE, trust_env=False) as http,
                ):
                    for context, rows in measured if length in (0, *LENGTHS) else middle:
                        seconds = _step(http, rows, context, length, repeats)
                        keep_least(steps[name], (rows, context, length), seconds)
                    for tokens in fitting if name in prompts else ():
                        keep_least(prompts[name], tokens, _prefill(http, pair, tokens, repeats))
            except UserError as error:
                if name in (PLAIN, NGRAM):
                    raise
                del steps[name], prompts[name]
                observer.warned(f"no step costs of {name}: {error}")
            observer.step()
    steps[NGRAM] |= steps[PLAIN]  # a lookup that finds nothing takes no time that can be measured
    return assembled(pair, steps, prompts, 0.0, version, ahead=False)


def _modes(server: Server, pair: Pair, lookups: Sequence[int]) -> dict[tuple[str, int], Mode]:
    """llama.cpp's ways to draft, by their keys and lengths, with every candidate accepted."""
    models = models_in(server, pair)
    modes = {(PLAIN, 0): Mode("llama.cpp", {})}
    drafters: dict[tuple[str, int], DrafterSettings] = {
        (NGRAM, k): PromptLookupSettings(min_ngram=1, max_ngram=1, max_tokens=k) for k in lookups
    }
    for name, k in product(pair.spec.drafts, LENGTHS):
        chain = DraftModelSettings(draft=name, policy=FixedSettings(max_tokens=k))
        drafters[name, k] = chain
    for (name, k), drafter in drafters.items():
        for mode in server.compared({f"llama.cpp {name} K={k}": drafter}, models):
            settings = {**mode.settings, "spec-synth-len": k + 1}
            modes[name, k] = replace(mode, settings=settings)
    return modes


def _step(http: httpx.Client, rows: int, context: int, length: int, repeats: int) -> float:
    """The median seconds of a step in which `rows` rows verify `length` candidates, with about
    `context` tokens in the cache."""
    width = 1 + length
    added = 1 + STEPS * width
    period = [ADDED, *(ADDED + 1 + n for n in range(length))]
    tokens = max(context - added // 2, 2 * width + 2)
    prompt = (period * (tokens // width + 1))[-tokens:]
    body = {
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "logit_bias": [[ADDED, 1e4]],
        "cache_prompt": True,
    }

    def decode(row: int, predicted: int) -> float:
        timings = _timings(http, {**body, "id_slot": row, "n_predict": predicted})
        verified = timings.get("draft_n", 0) / length if length else predicted - 1
        if predicted > 1 and not verified:
            raise UserError("llama.cpp: no candidates were proposed while its steps were timed")
        return float(timings["predicted_ms"]) / 1e3 / max(verified, 1)

    taken: list[float] = []
    with ThreadPoolExecutor(rows) as pool:
        list(pool.map(decode, range(rows), [1] * rows))  # the prompt, into the cache
        for _ in range(repeats):
            taken += pool.map(decode, range(rows), [added] * rows)
    return statistics.median(taken)


def _prefill(http: httpx.Client, pair: Pair, tokens: int, repeats: int) -> float:
    """The median seconds of the prefill of a prompt of `tokens` tokens."""
    vocabulary = len(pair.tokenizer)
    prompt = [(7 * n * n + n) % vocabulary for n in range(tokens)]  # does not repeat itself
    body = {"prompt": prompt, "n_predict": 1, "cache_prompt": False, "temperature": 0}
    taken = (float(_timings(http, body)["prompt_ms"]) / 1e3 for _ in range(repeats))
    return statistics.median(taken)


def _timings(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = http.post("/completion", json=body)
        answer.raise_for_status()
        return dict(answer.json()["timings"])
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise UserError(f"llama.cpp: its server does not answer: {error}") from None
