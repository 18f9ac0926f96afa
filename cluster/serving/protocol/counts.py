"""What an answer says of its tokens: how many, and how they came about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field

from specdec_core.config import Configuration, distinct_labels, identity
from specdec_core.tokens.statistics import Counts, Generation

NOBODY = "nobody"  # drafts, in a range of a schedule


def optional() -> Any:
    """A field that is left out where it is None."""
    return Field(default=None, exclude_if=lambda value: value is None)


class PromptTokens(BaseModel):
    cached_tokens: int  # which an earlier request's text in the cache began with


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens | None = optional()

    @classmethod
    def of(cls, generations: Sequence[Generation], choices: int = 1) -> Usage:
        """The sum over generations, of which `choices` after each other share a prompt."""
        prompts = generations[::choices]
        prompt = sum(g.prompt_tokens for g in prompts)
        completion = sum(len(g.tokens) for g in generations)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokens(cached_tokens=sum(g.cached_tokens for g in prompts)),
        )

    @classmethod
    def so_far(cls, prompt: int, completion: int) -> Usage:
        """Of one choice that is not finished."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
        )


class SpecDec(BaseModel):
    """How the tokens came about, summed over the request's choices (rates as in `Counts`)."""

    configuration: str  # its id
    lossless: bool
    rounds: int  # forwards of the target, N_target
    drafted: int
    accepted: int
    verification_rate: float
    mat: float
    arms: dict[str, int] = {}  # rounds by who drafted, where that changes from round to round

    @classmethod
    def of(
        cls,
        generations: Sequence[Generation],
        configuration: Configuration,
        arms: Iterable[tuple[Configuration, Mapping[int | None, int]]] = (),
    ) -> SpecDec:
        """`arms` are the rounds by the arm that drafted, for each configuration that had a part in
        them."""
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
    """Rounds by the label of who drafted, where any drafter has arms."""
    arms = list(arms)
    rounds: Counter[str] = Counter()
    for configuration, counts in arms:
        for arm, count in counts.items():
            rounds[drafted_by(configuration, arm)] += count
    return dict(rounds) if any(has_arms(configuration) for configuration, _ in arms) else {}


def has_arms(configuration: Configuration) -> bool:
    """Whether who drafts changes from round to round."""
    drafter = configuration.drafter
    return drafter is not None and drafter.chosen(0) != drafter


def drafted_by(configuration: Configuration, arm: int | None) -> str:
    """The label of the arm of a configuration that drafted; its own where it has no arms."""
    drafter = configuration.drafter
    if drafter is None or not has_arms(configuration):
        return configuration.label
    return NOBODY if arm is None else distinct_labels(drafter.parts)[identity(drafter.chosen(arm))]


class SpeculativeMetrics(BaseModel):
    """vLLM's counts of the rounds that had candidates, summed over the request's choices.
    `acceptance_histogram[j]` rounds kept j of them; `num_spec_tokens` is the longest path of
    candidates in a round."""

    mean_acceptance_length: float  # tokens of a round, the target's own included
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int

    @classmethod
    def of(cls, generations: Sequence[Generation]) -> SpeculativeMetrics:
        rounds = [r for generation in generations for r in generation.rounds if r.drafted]
        accepted, drafted = sum(r.accepted for r in rounds), sum(r.drafted for r in rounds)
        longest = max((max(r.depth, r.accepted) for r in rounds), default=0)
        kept = Counter(r.accepted for r in rounds)
        return cls(
            mean_acceptance_length=1 + accepted / max(len(rounds), 1),
            draft_acceptance_rate=accepted / max(drafted, 1),
            acceptance_histogram=[kept[count] for count in range(longest + 1)],
            num_spec_steps=len(rounds),
            num_accepted_draft_tokens=accepted,
            num_draft_tokens=drafted,
            num_spec_tokens=longest,
        )


class AnswerMetrics(BaseModel):
    """As vLLM names it."""

    speculative_decoding: SpeculativeMetrics

    @classmethod
    def of(cls, generations: Sequence[Generation]) -> AnswerMetrics:
        return cls(speculative_decoding=SpeculativeMetrics.of(generations))
