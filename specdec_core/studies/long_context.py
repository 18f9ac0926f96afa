"""The cost of a round by the length of its context.

Attention reads the cache once a forward, so a forward takes a + b · context. The rest of the round
must not depend on the context: nothing copies the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.studies.profiling import fill, time_forward

CONTEXTS = (128, 256, 512, 1024, 1536, 2000)
CANDIDATES = 7  # a round's, so that the target reads 8 tokens
_ROUNDS = 4  # of each kind, context and repeat
_TOKENS = _ROUNDS * (CANDIDATES + 1)


def room_for(contexts: Sequence[int]) -> int:
    """Tokens that a slot must hold to measure at `contexts`."""
    return max(contexts) + _TOKENS + CANDIDATES + 1


@dataclass(frozen=True)
class Line:
    """seconds = `fixed` + `per_token` · context, by least squares."""

    fixed: float
    per_token: float

    @classmethod
    def fit(cls, contexts: Sequence[float], seconds: Sequence[float]) -> Line:
        per_token, fixed = np.polyfit(contexts, seconds, 1)
        return cls(float(fixed), float(per_token))


def measure_contexts(
    pair: Pair,
    text: Sequence[int],
    contexts: Sequence[int] = CONTEXTS,
    draft: str | None = None,
    repeats: int = 5,
    observer: Observer | None = None,
) -> pd.DataFrame:
    """Median seconds by `context` of forwards of one row — `target_1` and `target_8` (tokens),
    `draft` (one token) — and of whole rounds of the engine: `autoregressive_round`, and `round`
    with K = 7 of `draft`. `rest` is what a round takes beyond its forwards, `autoregressive_rest`
    likewise. Contexts take turns; `text` is repeated to fill them.

    Raises:
        UserError: the pair cannot hold the longest context and what is decoded after it.
    """
    contexts = sorted(set(contexts))
    if room_for(contexts) > pair.max_length:
        raise UserError(
            f"a context of {contexts[-1]} tokens and {room_for(contexts) - contexts[-1]} after it"
            f" are more than the {pair.max_length} that the pair can hold"
        )
    name = pair.draft_name(draft)
    policy = FixedSettings(max_tokens=CANDIDATES)
    chain = Configuration(drafter=DraftModelSettings(draft=name, policy=policy))
    rounds = {"autoregressive_round": (AUTOREGRESSIVE, 0), "round": (chain, CANDIDATES)}
    forwards = {"target_1": (None, 1), "target_8": (None, CANDIDATES + 1), "draft": (name, 1)}
    runners = {None: pair.open_runner(None, 1), name: pair.open_alone(name, 1)}
    engine = Engine(pair)
    prompts = {c: tuple(np.resize(np.asarray(text), c).tolist()) for c in contexts}
    seconds: dict[tuple[int, str], list[float]] = {
        (c, part): [] for c in contexts for part in (*forwards, *rounds)
    }
    observer = observer or Observer()
    observer.stage("measuring contexts", (repeats + 1) * len(contexts))
    for repeat in range(repeats + 1):
        for context in contexts:
            for runner in runners.values():
                runner.truncate(0, min(context, runner.lengths[0]))
                fill(runner, context)
            for _ in range(_ROUNDS):
                for part, (which, width) in forwards.items():
                    seconds[context, part].append(time_forward(runners[which], width, 1))
            for part, (configuration, drafted) in rounds.items():
                engine.configure(configuration)
                tokens = _ROUNDS * (drafted + 1)
                request = Request(part, prompts[context], tokens, ignore_eos=True)
                [generation] = engine.generate([request])
                whole = [r for r in generation.rounds if r.drafted == drafted]
                seconds[context, part] += [r.seconds for r in whole[:_ROUNDS]]
            if repeat == 0:  # warmed up
                for part in (*forwards, *rounds):
                    seconds[context, part].clear()
            observer.step()
    table = pd.DataFrame(
        {"context": c, **{part: np.median(seconds[c, part]) for part in (*forwards, *rounds)}}
        for c in contexts
    )
    table["autoregressive_rest"] = table["autoregressive_round"] - table["target_1"]
    table["rest"] = table["round"] - table["target_8"] - CANDIDATES * table["draft"]
    return table


def at_contexts(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    contexts: Sequence[int] | None = None,
    draft: str | None = None,
    observer: Observer | None = None,
) -> pd.DataFrame:
    """:func:`measure_contexts` on the text of `prompts`, with as much room as `contexts` need;
    unset, at as many of :data:`CONTEXTS` as the models hold."""
    room = room_for(contexts or CONTEXTS)
    runner = pair.spec.runner
    longer = runner.model_copy(update={"max_length": max(runner.max_length, room)})
    pair = replace(pair, spec=pair.spec.model_copy(update={"runner": longer}))
    fitting = [context for context in CONTEXTS if room_for((context,)) <= pair.max_length]
    text = [token for prompt in prompts for token in prompt]
    return measure_contexts(pair, text, contexts or fitting, draft, observer=observer)
