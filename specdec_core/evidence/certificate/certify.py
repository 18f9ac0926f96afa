"""All checks that a certificate needs, on real prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.engine import Engine, Request
from specdec_core.engine.turns import requests_of
from specdec_core.evidence.bench.race import EngineContestant, race
from specdec_core.evidence.bench.result import first_difference
from specdec_core.evidence.certificate.certificate import Checks, GreedyIdentity, LiveSpeed
from specdec_core.evidence.certificate.decoding import decoded
from specdec_core.evidence.certificate.distribution import check_distribution
from specdec_core.models.pair import Pair
from specdec_core.prompts.conversation import conversations
from specdec_core.prompts.prompt import Prompt
from specdec_core.tokens.statistics import paired_ratio

FLOAT32 = {"target_dtype": "float32", "draft_dtype": "float32"}


@dataclass(frozen=True)
class Extent:
    """How much is decoded: `texts` are sampled for each prompt, `slots` requests at a time; `timed`
    prompts are decoded `repeats` times."""

    max_new_tokens: int = 64
    texts: int = 4
    slots: int = 4
    timed: int = 12
    repeats: int = 3


def check_all(
    pair: Pair,
    configuration: Configuration,
    prompts: Sequence[Prompt],
    extent: Extent,
    observer: Observer,
) -> Checks:
    """Check a configuration on the loaded `pair` and `prompts` for its tokenizer. The speed is that
    of the pair, the outputs are those of its models in float32. Raises :class:`UserError` where it
    cannot be decoded."""
    speed = time_live(pair, configuration, prompts[: extent.timed], extent, observer)
    exact = in_float32(pair)
    requests = requests_of(prompts, exact, extent.max_new_tokens)
    repeated = [
        replace(request, id=f"{request.id} {n}", seed=number * extent.texts + n)
        for number, request in enumerate(requests)
        for n in range(extent.texts)
    ]
    return Checks(
        greedy=check_greedy(exact, configuration, requests, extent.slots, observer),
        sampled=check_distribution(exact, configuration, repeated, extent.slots, observer),
        speed=speed,
    )


def in_float32(pair: Pair) -> Pair:
    """The pair with all models in float32: itself where they are."""
    runner = pair.spec.runner.model_copy(update=FLOAT32)
    return pair.reloaded(pair.spec.model_copy(update={"runner": runner}))


def time_live(
    pair: Pair,
    configuration: Configuration,
    prompts: Sequence[Prompt],
    extent: Extent,
    observer: Observer,
) -> LiveSpeed:
    """Time the configuration interleaved with autoregressive decoding."""
    engine, sampling = Engine(pair, configuration), configuration.sampling
    contestants = [EngineContestant(engine, c, "") for c in (AUTOREGRESSIVE, configuration)]
    asked = conversations(prompts, pair.tokenizer, extent.max_new_tokens, pair.max_length)
    baseline, ours = race(
        contestants, asked, extent.max_new_tokens, [sampling], extent.repeats, observer
    )
    ratio = paired_ratio(baseline.seconds_per_token, ours.seconds_per_token)
    return LiveSpeed(
        prompts=len(asked),
        repeats=extent.repeats,
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
        tokens_per_second=ours.tokens_per_second,
        target_dtype=pair.spec.runner.target_dtype,
        draft_dtype=pair.spec.runner.draft_dtype,
    )


def check_greedy(
    pair: Pair,
    configuration: Configuration,
    requests: Sequence[Request],
    slots: int,
    observer: Observer,
) -> GreedyIdentity:
    """Decode `requests` with `slots` of them at a time, and each alone and autoregressively.

    Sharing steps with other requests must change nothing either, as when serving.
    """
    observer.stage("greedy texts, autoregressive", len(requests))
    greedy = {"sampling": configuration.sampling.model_copy(update={"temperature": 0.0})}
    alone, ours = (c.model_copy(update=greedy) for c in (AUTOREGRESSIVE, configuration))
    expected = Engine(pair, alone).generate(requests, lambda _: observer.step())
    observer.stage("greedy texts, speculative", len(requests))
    found = decoded(pair, ours, requests, slots, observer)
    differing, first = 0, ""
    for request, one, other in zip(requests, found, expected, strict=True):
        if one.tokens != other.tokens:
            differing += 1
            first = first or difference(request, one.tokens, other.tokens, partial(margin_of, pair))
    return GreedyIdentity(
        prompts=len(requests),
        tokens=sum(len(generation.tokens) for generation in expected),
        slots=slots,
        differing=differing,
        first=first,
    )


def difference(
    request: Request,
    ours: Sequence[int],
    theirs: Sequence[int],
    margin: Callable[[Sequence[int], int, int], float],
) -> str:
    """Where two texts begin to differ, and by how much the target prefers its own token: next to
    nothing tells of a tie that rounding decides, and not of a fault. `margin` gives that for the
    tokens before, the target's token and the other one."""
    at = first_difference(ours, theirs)
    if at is None or at == min(len(ours), len(theirs)):
        return f"prompt {request.id}, after token {at}: one of the texts ends there"
    higher = margin([*request.tokens, *theirs[:at]], theirs[at], ours[at])
    return (
        f"prompt {request.id}, token {at}: {ours[at]} in place of {theirs[at]}, whose logit is"
        f" {higher:.2g} higher"
    )


def margin_of(pair: Pair, tokens: Sequence[int], preferred: int, other: int) -> float:
    """By how much the target's logit of one token is higher than that of another."""
    logits = pair.logits(tokens)[-1].float()
    return float(logits[preferred] - logits[other])
