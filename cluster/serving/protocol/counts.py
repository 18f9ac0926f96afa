"""What an answer says of its tokens: how many, and how they came about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import BaseModel

from specdec_core.config import Configuration, DrafterSettings, distinct_labels, identity
from specdec_core.tokens.statistics import Counts, Generation

NOBODY = "nobody"  # drafts, in a range of a schedule


class PromptTokens(BaseModel):
    cached_tokens: int  # which an earlier request's text in the cache began with


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens

    @classmethod
    def of(cls, generations: Sequence[Generation]) -> Usage:
        prompt = sum(g.prompt_tokens for g in generations)
        completion = sum(len(g.tokens) for g in generations)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokens(
                cached_tokens=sum(g.cached_tokens for g in generations)
            ),
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
    def of(cls, generations: Sequence[Generation], configuration: Configuration) -> SpecDec:
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
            arms=_arms(generations, configuration.drafter),
        )


def _arms(generations: Sequence[Generation], drafter: DrafterSettings | None) -> dict[str, int]:
    """Rounds by the label of the arm that drafted, of a drafter that has arms."""
    if drafter is None or drafter.chosen(0) == drafter:
        return {}
    labels = distinct_labels(drafter.parts)
    rounds = Counter(r.arm for generation in generations for r in generation.rounds)
    return {
        NOBODY if arm is None else labels[identity(drafter.chosen(arm))]: count
        for arm, count in rounds.items()
    }
