"""All checks that a certificate needs, on real prompts, in this library's engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Configuration, Sampling
from specdec_core.drafting.schedule.settings import ScheduleSettings
from specdec_core.engine import Engine, Request
from specdec_core.engine.turns import requests_of
from specdec_core.evidence.bench.race import EngineContestant, race
from specdec_core.evidence.certificate.certificate import Checks, LiveSpeed
from specdec_core.evidence.certificate.outputs import Asked, Reference, Speculated, check_outputs
from specdec_core.measure.losses import again_if_lost
from specdec_core.measure.paired import paired_ratio
from specdec_core.models.pair import Pair
from specdec_core.prompts.conversation import conversations
from specdec_core.prompts.prompt import Prompt
from specdec_core.tokens.statistics import Counts, Generation

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

    def at_a_time(self, configuration: Configuration, prompts: Sequence[Prompt]) -> int:
        """The requests to decode at a time: `slots`, or as many as the last range of a schedule
        begins with. Raises :class:`UserError` where there are fewer prompts than that."""
        drafters = () if configuration.drafter is None else configuration.drafter.walk()
        schedules = (each for each in drafters if isinstance(each, ScheduleSettings))
        last = max((max(each.ranges) for each in schedules), default=1)
        if last > len(prompts):
            raise UserError(
                f"{configuration.label}: its last range begins with {last} requests, but there are"
                f" {len(prompts)} prompts: give {last} or more (--limit)"
            )
        return max(self.slots, last)


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
    slots = extent.at_a_time(configuration, prompts)
    speed = time_live(pair, configuration, prompts[: extent.timed], extent, observer)
    exact = in_float32(pair)
    asked = Asked.of(requests_of(prompts, exact, extent.max_new_tokens), extent.texts)
    reference = Reference.of_weights(exact, asked, observer, configuration.sampling)
    found = speculated(exact, configuration, asked, slots, observer)
    dtype = exact.spec.runner.target_dtype
    checks = check_outputs(found, reference, asked, exact, dtype, slots, observer)
    return checks.model_copy(update={"speed": speed})


def in_float32(pair: Pair) -> Pair:
    """The pair with all models in float32: itself where they are."""
    return pair.reloaded(pair.spec.with_runner(**FLOAT32))


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
    ratio = paired_ratio(baseline.paces(), ours.paces())
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


def speculated(
    pair: Pair, configuration: Configuration, asked: Asked, slots: int, observer: Observer
) -> Speculated:
    """The engine's outputs under a configuration, `slots` of them at a time, because sharing steps
    with other requests must change nothing either: greedy ones, and sampled ones, at temperature 1
    where the configuration is greedy. Raises :class:`UserError` where a configuration that drafts
    had no candidate verified: nothing would have been checked."""
    sampling = configuration.sampling
    drawn = sampling.model_copy(update={"temperature": 1.0}) if sampling.greedy else sampling
    greedy = sampling.model_copy(update={"temperature": 0.0})

    def decoded(stage: str, requests: Sequence[Request], own: Sampling) -> list[Generation]:
        observer.stage(stage, len(requests))

        def decode() -> list[Generation]:
            engine = Engine(pair, configuration.model_copy(update={"sampling": own}), slots)
            engine.wait_for_draft()
            with pair.undisturbed():
                return engine.generate(requests, lambda _: observer.step())

        return again_if_lost(decode, observer)

    texts = decoded("greedy texts, speculative", asked.greedy, greedy)
    samples = decoded("sampled texts", asked.sampled, drawn)
    if configuration.drafter is not None and not Counts.of([*texts, *samples]).n_drafted:
        raise UserError(f"{configuration.label}: no candidate was verified, so nothing was checked")
    return Speculated([each.tokens for each in texts], [each.tokens for each in samples], drawn)
