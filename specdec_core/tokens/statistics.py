"""The records of rounds and generations, and the metrics made from them.

Names follow the papers: N generated tokens, N_draft and N_target forward passes, N_discarded
drafted tokens that are not in the output. "Acceptance rate" means accepted / drafted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike

from specdec_core.tokens.token_tree import TokenOrigin

if TYPE_CHECKING:
    import pandas as pd


@dataclass(slots=True)
class Round:
    """One draft-verify-commit round of one request. Times are seconds of the whole engine step,
    which the slots of a batch share. They are split in two ways: drafting, the target and the rest;
    and the forwards of both models, the length policy, verification and bookkeeping."""

    position: int  # generated tokens before the round
    drafted: int  # candidate tokens sent to verification
    accepted: int  # candidates that are in the output
    generated: int  # tokens the round added to the output
    draft_forwards: int
    draft_seconds: float
    target_seconds: float
    other_seconds: float
    depth: int = 0  # of the deepest candidate
    draft_tokens: int = 0  # positions at which the draft model gave a distribution
    arm: int | None = None  # which of a bandit's arms proposed
    draft_forward_seconds: float = 0.0  # of `draft_seconds`, in the draft model
    policy_seconds: float = 0.0  # of `draft_seconds`: choosing tokens, the length policy
    target_forward_seconds: float = 0.0  # of `target_seconds`, in the target
    verify_seconds: float = 0.0  # of `other_seconds`, accepting and rejecting

    @property
    def seconds(self) -> float:
        """Of the whole round."""
        return self.draft_seconds + self.target_seconds + self.other_seconds

    @property
    def bookkeeping_seconds(self) -> float:
        """Of the round, what is neither a forward nor policy nor verification."""
        named = self.draft_forward_seconds + self.policy_seconds + self.target_forward_seconds
        return self.seconds - named - self.verify_seconds


# "stop": EOS or a stop string; "error": the target's logits were no numbers
FinishReason = Literal["length", "stop", "error"]
# Origins of tokens that the target chose itself.
OF_THE_TARGET = (TokenOrigin.CORRECTION, TokenOrigin.BONUS, TokenOrigin.TARGET)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The target's log-probability of a token, and the `top` most likely tokens there with their
    log-probabilities, falling: the log-softmax of its logits before any warper (what vLLM calls
    raw_logprobs)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Generation:
    """A finished request: tokens, text, and how they came about."""

    request_id: str
    prompt_tokens: int
    tokens: list[int]
    text: str
    origins: list[TokenOrigin]
    rounds: list[Round]
    finish_reason: FinishReason
    prefill_seconds: float = 0.0  # until the first token, and of the draft models' prefill
    seconds: float = 0.0  # from the first prompt token to the last output token
    cached_tokens: int = 0  # of the prompt, which a slot held already
    logprobs: list[TokenLogprobs] | None = None  # of each token, where asked for
    # Of each of the prompt's tokens after the first, where asked for.
    prompt_logprobs: list[TokenLogprobs] | None = None

    @property
    def counts(self) -> Counts:
        return Counts.of([self])

    @property
    def ended(self) -> Literal["length", "stop"]:
        """The finish reason of a generation without an error."""
        assert self.finish_reason != "error", self.failure
        return self.finish_reason

    @property
    def failure(self) -> str | None:
        """The error that ended it; None where there is none."""
        if self.finish_reason != "error":
            return None
        length = self.prompt_tokens + len(self.tokens)
        return (
            f"after {length} tokens of this sequence the target's logits are NaN or infinite, or"
            " exclude every token"
        )


@dataclass(frozen=True, slots=True)
class Counts:
    """Forward passes and tokens summed over generations; they do not depend on load."""

    requests: int = 1
    n: int = 1  # N
    n_draft: int = 0
    n_target: int = 0
    n_discarded: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_target_tokens: int = 0  # the target's own tokens in the output
    n_draft_tokens: int = 0  # positions at which the draft model gave a distribution
    # Draft forwards that were not in vain: of each round at most as many as it accepted tokens. Not
    # compared, as the counts of older sweeps lack it.
    n_draft_kept: int = field(default=0, compare=False)

    @classmethod
    def of(cls, generations: Iterable[Generation]) -> Counts:
        generations = list(generations)
        origins = [origin for g in generations for origin in g.origins]
        return cls._of_rounds(
            [r for g in generations for r in g.rounds],
            requests=len(generations),
            n=len(origins),
            n_target_tokens=sum(origin in OF_THE_TARGET for origin in origins),
        )

    @classmethod
    def by_arm_and_width(cls, generations: Iterable[Generation]) -> list[tuple[int | None, Counts]]:
        """The counts of the rounds that each of a bandit's arms proposed for, apart for every
        number of candidates; None: of the rounds without an arm."""
        generations = list(generations)
        alike: dict[tuple[int | None, int], list[Round]] = {}
        for r in (r for g in generations for r in g.rounds):
            alike.setdefault((r.arm, r.drafted), []).append(r)
        return [
            (
                arm,
                cls._of_rounds(
                    rounds,
                    requests=len(generations),
                    n=sum(r.generated for r in rounds),
                    n_target_tokens=sum(r.generated > r.accepted for r in rounds),
                ),
            )
            for (arm, _), rounds in alike.items()
        ]

    @classmethod
    def _of_rounds(
        cls, rounds: Sequence[Round], requests: int, n: int, n_target_tokens: int
    ) -> Counts:
        return cls(
            requests=requests,
            n=n,
            n_draft=sum(r.draft_forwards for r in rounds),
            n_target=len(rounds),
            n_discarded=sum(r.drafted - r.accepted for r in rounds),
            n_drafted=sum(r.drafted for r in rounds),
            n_accepted=sum(r.accepted for r in rounds),
            n_target_tokens=n_target_tokens,
            n_draft_tokens=sum(r.draft_tokens for r in rounds),
            n_draft_kept=sum(min(r.draft_forwards, r.accepted) for r in rounds),
        )

    def metrics(self) -> dict[str, float]:
        """The papers' rates. Discard rate N_discarded/N, verification rate N_target/N, MAT
        N/N_target, acceptance rate accepted/drafted, utilisation N/N_draft (Post-use, Eq. 3)."""
        n, drafts = max(self.n, 1), self.n_draft
        return {
            "discard_rate": self.n_discarded / n,
            "verification_rate": self.n_target / n,
            "mat": self.n / max(self.n_target, 1),
            "acceptance_rate": self.n_accepted / self.n_drafted if self.n_drafted else 0.0,
            "utilisation": self.n / drafts if drafts else 0.0,
        }

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def rounds_frame(generations: Sequence[Generation], **columns: str) -> pd.DataFrame:
    """One row a round: `columns` (the same for all rows), request_id, round, and Round's fields."""
    import pandas as pd  # decoding needs none

    rows = [
        {**columns, "request_id": g.request_id, "round": i, **asdict(r)}
        for g in generations
        for i, r in enumerate(g.rounds)
    ]
    return pd.DataFrame(rows)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of two times, and its bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def tied(self) -> bool:
        """Whether the interval includes 1: there is no measurable difference."""
        return self.low <= 1.0 <= self.high


def as_long(
    seconds: np.ndarray, prefill: ArrayLike, tokens: ArrayLike, wanted: ArrayLike
) -> np.ndarray:
    """The seconds (…, outputs) that outputs of `tokens` tokens each would have taken with `wanted`
    tokens each.

    Prefill, the first `prefill` seconds up to the first token (0: unknown), takes as long for any
    length. Tokens that an output lacks count at the mean pace of all outputs, in seconds a token,
    because an output that ends at once has no pace.
    """
    opening = np.minimum(prefill, seconds)
    first = opening > 0
    decoding = seconds - opening
    steps, needed = np.maximum(tokens, 1) - first, np.maximum(wanted, 1) - first
    shorter = decoding * needed / np.maximum(steps, 1)
    longer = decoding + decoding.sum() / max(steps.sum(), 1) * (needed - steps)
    return np.asarray(opening + np.where(needed < steps, shorter, longer))
