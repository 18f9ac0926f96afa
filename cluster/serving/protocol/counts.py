"""The counts of an answer: its tokens, and how they were decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel

from cluster.serving.protocol.fields import optional
from specdec_core.config import Configuration, distinct_labels, identity
from specdec_core.tokens.statistics import Counts, Generation

NO_DRAFTER = "no drafter"  # the label of a range without speculation in a schedule


class PromptTokens(BaseModel):
    cached_tokens: int  # prefix-cache hits


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens | None = optional()

    @classmethod
    def of(cls, generations: Sequence[Generation], choices: int = 1) -> Usage:
        """The sum over generations. Each prompt has `choices` consecutive ones."""
        prompts = generations[::choices]
        usage = cls.so_far(
            sum(g.prompt_tokens for g in prompts), sum(len(g.tokens) for g in generations)
        )
        cached = sum(g.cached_tokens for g in prompts)
        usage.prompt_tokens_details = PromptTokens(cached_tokens=cached)
        return usage

    @classmethod
    def so_far(cls, prompt: int, completion: int) -> Usage:
        """The tokens of a choice that is not finished."""
        return cls(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion
        )


class SpecDec(BaseModel):
    """How the tokens were decoded, summed over the request's choices (rates as in `Counts`)."""

    configuration: str  # its id
    lossless: bool
    rounds: int  # forwards of the target model, N_target
    drafted: int
    accepted: int
    verification_rate: float
    mat: float
    arms: dict[str, int] = {}  # rounds of each drafter, where the drafter changes between rounds

    @classmethod
    def of(
        cls,
        generations: Sequence[Generation],
        configuration: Configuration,
        arms: Iterable[tuple[Configuration, Mapping[int | None, int]]] = (),
    ) -> SpecDec:
        """`arms` has the rounds of each arm, for every configuration that decoded some of them."""
        counts = Counts.of(generations)
        metrics = counts.metrics()
        return cls(
            configuration=configuration.id,
            lossless=configuration.lossless,
            rounds=counts.n_target,
            drafted=counts.n_drafted,
            accepted=counts.n_accepted,
            verification_rate=metrics["verification_rate"],
            mat=metrics["mat"],
            arms=_by_label(arms),
        )


def _by_label(arms: Iterable[tuple[Configuration, Mapping[int | None, int]]]) -> dict[str, int]:
    """Rounds by the drafter's label, where any drafter has arms."""
    rounds, several = Counter[str](), False
    for configuration, counts in arms:
        several |= has_arms(configuration)
        for arm, count in counts.items():
            rounds[drafted_by(configuration, arm)] += count
    return dict(rounds) if several else {}


def has_arms(configuration: Configuration) -> bool:
    """Whether the drafter changes between rounds."""
    drafter = configuration.drafter
    return drafter is not None and drafter.chosen(0) != drafter


def drafted_by(configuration: Configuration, arm: int | None) -> str:
    """The label of the arm that drafted; the configuration's own where it has no arms."""
    drafter = configuration.drafter
    if drafter is None or not has_arms(configuration):
        return configuration.label
    if arm is None:
        return NO_DRAFTER
    return distinct_labels(drafter.parts)[identity(drafter.chosen(arm))]
