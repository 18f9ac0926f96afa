"""Choosing the next drafter: UCBSpec and EXP3Spec (BanditSpec, Hou et al., 2025), and Thompson
sampling.

Each round of decoding pulls one of K arms, which are drafters. Its reward is the number of tokens
that it adds to the output, Y ∈ 1 … L + 1. The rules need no horizon. The output keeps the target's
distribution whichever arm is pulled, since each arm keeps it.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from specdec_core.base.errors import UserError
from specdec_core.config import parse

Rule = Literal["ucb", "exp3", "thompson"]
Reward = Literal["tokens", "time"]


class ArmSums(BaseModel, extra="forbid"):
    """All that a bandit learns: sums over the rounds of each arm, one entry an arm.

    The sums of several bandits with the same arms can be added: the result is what one bandit would
    have learned from all their rounds. This holds for EXP3Spec's Σ Ẑ, too: each Ẑ is divided by the
    probability with which its own bandit drew the arm, which makes it an unbiased estimate of the
    loss.
    """

    rounds: list[int]  # n_i, the observed pulls
    tokens: list[int]  # Σ Y
    seconds: list[float]  # Σ T
    losses: list[float]  # Σ Ẑ of EXP3Spec; zeros otherwise
    tokens_squared: list[float]  # Σ Y²
    products: list[float]  # Σ Y T
    seconds_squared: list[float]  # Σ T²


SUMS = tuple(ArmSums.model_fields)


class BanditState(ArmSums):
    """The saved state of a bandit."""

    rule: Rule
    reward: Reward
    arms: list[str]  # their ids
    names: list[str]
    longest: int = Field(ge=1)  # L
    selections: int = Field(ge=0)

    def model_post_init(self, _: object) -> None:
        for name in SUMS:
            values = getattr(self, name)
            if len(values) != len(self.arms) or not all(0 <= v < math.inf for v in values):
                raise ValueError(f"{name} must be {len(self.arms)} finite numbers of at least 0")


class Bandit(ABC):
    """Chooses among `arms` and learns from their rounds.

    `longest` is L, the most candidate tokens that an arm may propose: a round's reward is
    1 … L + 1 tokens. Reward "time" is ours: arms cost differently, and the goal is accepted tokens
    a millisecond, ΣY / ΣT of each arm. It is kept on the scale of tokens, which the papers' radius
    and losses assume: Y of arm i counts as Y · T_min / T_i, the tokens that it would have added in
    a round of the fastest arm. T_i is the mean time of an arm's rounds, because the times of single
    rounds are noisy; T_min is the least mean. The radius is not divided by T_i, so that an arm is
    tried again after a first round that happened to be slow.

    `names` and `ids` are the arms'. `confidence` and `exploration` are UCBSpec's; `seed` is for the
    rules that draw arms. The slots of a batch all choose before the first of their rounds ends;
    `slot` keeps them apart.
    """

    rule: ClassVar[Rule]

    def __init__(
        self,
        arms: int,
        longest: int,
        *,
        reward: Reward = "tokens",
        names: Sequence[str] | None = None,
        ids: Sequence[str] | None = None,
        confidence: float = 0.05,
        exploration: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.names = list(names) if names is not None else [str(arm) for arm in range(arms)]
        self.ids = list(ids) if ids is not None else self.names
        self.arms, self.longest, self.reward = arms, longest, reward
        self.confidence, self.exploration, self.seed = confidence, exploration, seed
        self.selections = 0
        self.rounds = [0] * arms
        self.tokens = [0] * arms
        self.seconds = [0.0] * arms
        self.losses = [0.0] * arms
        self.tokens_squared = [0.0] * arms
        self.products = [0.0] * arms
        self.seconds_squared = [0.0] * arms
        self._shared = self._sums()  # what other bandits know as well

    @abstractmethod
    def select(self, slot: int = 0) -> int:
        """The arm to pull in the coming round of `slot`."""

    def update(self, arm: int, tokens: int, seconds: float = 0.0, slot: int = 0) -> None:
        """A round of `arm`, the last one selected for `slot`, added `tokens` to the output and took
        `seconds`. Rounds that the end of the request cut are better left out."""
        if not 1 <= tokens <= self.longest + 1:
            raise ValueError(f"a round of 1 … {self.longest + 1} tokens, got {tokens}")
        if self.reward == "time" and not seconds > 0:
            raise ValueError(f"a round must take some time, got {seconds} s")
        self.rounds[arm] += 1
        self.tokens[arm] += tokens
        self.seconds[arm] += seconds
        self.tokens_squared[arm] += tokens**2
        self.products[arm] += tokens * seconds
        self.seconds_squared[arm] += seconds**2

    def paces(self) -> list[float]:
        """The value of a token of each arm: T_min / T_i for reward in time, else 1."""
        if self.reward == "tokens":
            return [1.0] * self.arms
        means = [s / n if n else 0.0 for s, n in zip(self.seconds, self.rounds, strict=True)]
        least = min((mean for mean in means if mean), default=0.0)
        return [least / mean if mean else 1.0 for mean in means]

    def worths(self) -> list[float]:
        """Mean tokens of each arm's rounds, at its pace; infinite where there were none."""
        return [
            y / n * pace if n else math.inf
            for y, n, pace in zip(self.tokens, self.rounds, self.paces(), strict=True)
        ]

    def deviations(self, arm: int) -> float:
        """How far an arm's rounds deviate, in tokens squared: V = Σ (Y - ȳ)², by time
        V = Σ (Y - r T)² with r = ΣY / ΣT."""
        tokens, squared = self.tokens[arm], self.tokens_squared[arm]
        if self.reward == "time":
            rate = tokens / self.seconds[arm]
            found = squared - 2 * rate * self.products[arm] + rate**2 * self.seconds_squared[arm]
        else:
            found = squared - tokens**2 / self.rounds[arm]
        return max(found, 0.0)  # rounding

    def rows(self) -> list[dict[str, Any]]:
        """One row an arm, None where nothing is known."""
        total = max(sum(self.rounds), 1)
        return [
            {
                "arm": name,
                "rounds": n,
                "share": n / total,
                "tokens": tokens / n if n else None,
                "per_millisecond": tokens / seconds / 1e3 if seconds else None,
            }
            for name, n, tokens, seconds in zip(
                self.names, self.rounds, self.tokens, self.seconds, strict=True
            )
        ]

    def _sums(self) -> dict[str, list[float]]:
        return {name: list(getattr(self, name)) for name in SUMS}

    def state(self) -> dict[str, Any]:
        """Everything learned, as values that JSON can hold; see :class:`BanditState`."""
        return {
            "rule": self.rule,
            "reward": self.reward,
            "arms": list(self.ids),
            "names": list(self.names),
            "longest": self.longest,
            "selections": self.selections,
            **self._sums(),
        }

    def restore(self, state: dict[str, Any], source: str = "the state") -> None:
        """Continue from a :meth:`state`, exactly as the bandit that it was taken from would. Raises
        :class:`UserError` where it is not a bandit's state, or has another rule or other arms."""
        saved = parse(BanditState, state, f"{source}: not a bandit's state")
        saved_rule, rule = (f"{b.rule} by {b.reward}" for b in (saved, self))
        if saved_rule != rule:
            raise UserError(f"{source}: learned by {saved_rule}, the bandit is {rule}")
        if sorted(saved.arms) != sorted(self.ids) or saved.longest != self.longest:
            raise UserError(
                f"{source}: of other arms: {', '.join(saved.names)} (at most "
                f"{saved.longest} tokens), the bandit's are {', '.join(self.names)} (at most "
                f"{self.longest})"
            )
        self.selections = saved.selections
        for name in SUMS:
            values = getattr(saved, name)
            setattr(self, name, [values[saved.arms.index(arm)] for arm in self.ids])
        self._shared = self._sums()

    def gained(self) -> dict[str, Any]:
        """What its own rounds have added to its sums since the last call."""
        before, self._shared = self._shared, self._sums()
        return {
            name: [new - old for new, old in zip(self._shared[name], before[name], strict=True)]
            for name in SUMS
        }

    def absorb(self, gain: Mapping[str, Any]) -> None:
        """Add what another bandit with the same arms has gained."""
        for name in SUMS:
            for sums in (getattr(self, name), self._shared[name]):
                sums[:] = [a + b for a, b in zip(sums, gain[name], strict=True)]


class UCBSpec(Bandit):
    """Each arm once, then the arm with the highest upper confidence bound μ̂ + cr (Alg. 7), the
    lowest of equals. `confidence` is δ. `exploration` scales the radius. With the paper's 1 the
    bound holds for any process with these means; with less, arms are told apart sooner.

    By time the radius is ours and has no δ. The paper's radius lets each round's tokens vary as
    much as L + 1 values can. About the number that a round's time predicts, they vary far less: an
    arm that drafts longer takes more time and adds more tokens."""

    rule = "ucb"

    def select(self, slot: int = 0) -> int:
        self.selections += 1
        bounds = self.preferences()
        return bounds.index(max(bounds))

    def preferences(self) -> list[float]:
        """Each arm's upper confidence bound, in tokens."""
        return [
            worth + self.exploration * self.radius(arm) if self.rounds[arm] else worth
            for arm, worth in enumerate(self.worths())
        ]

    def radius(self, arm: int) -> float:
        """In tokens: cr_{i,t} = L/2 · √((1 + n)/n² · (1 + 2 log(K t² √(1 + n) / δ))). By time

            cr_{i,t} = √((L²/4 + V) · 2 log t) / n,  V = Σ (Y - r T)²,  r = ΣY / ΣT,

        where L²/4 stands for the round to come, so that few equal rounds do not end the search."""
        t, n = sum(self.rounds), self.rounds[arm]
        if self.reward == "time":
            inside = self.longest**2 / 4 + self.deviations(arm)
            return math.sqrt(inside * 2 * math.log(t)) / n
        inside = math.log(self.arms / self.confidence) + 2 * math.log(t) + math.log1p(n) / 2
        return self.longest / 2 * math.sqrt((1 + n) / n**2 * (1 + 2 * inside))


class EXP3Spec(Bandit):
    """Draws arm i with p_i ∝ exp(−η_t Σ Ẑ_i), η_t = √(log K / (t K)), where a pulled arm's loss is
    Ẑ = (L + 1 − Y) / (L p) and the loss of the other arms is 0 (Alg. 8).

    The slide's indices are off by one in step 5: the t-th pull is drawn from p_t, made from the
    losses of the t − 1 pulls before it. Each selection has a separate random stream, made from
    `seed` and its number, so that a restored bandit and a replayed one draw alike.
    """

    rule = "exp3"

    def __init__(self, arms: int, longest: int, **settings: Any) -> None:
        super().__init__(arms, longest, **settings)
        self._drawn: dict[int, float] = {}  # the probability of each slot's last selection

    def select(self, slot: int = 0) -> int:
        uniform = random.Random(self.seed << 32 | self.selections).random()
        self.selections += 1
        probabilities = self.preferences()
        chosen = bisect_right([*accumulate(probabilities)], uniform)
        if chosen == self.arms:  # rounding left the sum below `uniform`
            chosen = probabilities.index(max(probabilities))
        self._drawn[slot] = probabilities[chosen]
        return chosen

    def update(self, arm: int, tokens: int, seconds: float = 0.0, slot: int = 0) -> None:
        super().update(arm, tokens, seconds, slot)
        p = self._drawn.pop(slot)
        worth = tokens * self.paces()[arm]
        self.losses[arm] += (self.longest + 1 - worth) / (self.longest * p)

    def preferences(self) -> list[float]:
        """Each arm's probability."""
        t = sum(self.rounds) + 1
        rate = math.sqrt(math.log(self.arms) / (t * self.arms))
        least = min(self.losses)
        weights = [math.exp(-rate * (loss - least)) for loss in self.losses]
        total = sum(weights)
        return [weight / total for weight in weights]


class Thompson(Bandit):
    """Each arm once, then the arm with the highest worth, drawn for each from the distribution that
    its rounds leave possible (Thompson sampling; ours):

        N(μ̂_i, (L²/4 + V_i) / n_i²),

    μ̂_i the mean tokens of arm i's rounds, at its pace; V_i how far they deviate, and L²/4 for the
    round to come, as in :class:`UCBSpec` by time. There is no parameter: an arm is tried as often
    as it may still be the best. Each selection has a separate random stream, as in
    :class:`EXP3Spec`.
    """

    rule = "thompson"

    def select(self, slot: int = 0) -> int:
        draws = random.Random(self.seed << 32 | self.selections)
        self.selections += 1
        drawn = [
            draws.gauss(worth, self.uncertainty(arm)) if self.rounds[arm] else worth
            for arm, worth in enumerate(self.worths())
        ]
        return drawn.index(max(drawn))

    def uncertainty(self, arm: int) -> float:
        """The standard deviation of an arm's worth, in tokens."""
        return math.sqrt(self.longest**2 / 4 + self.deviations(arm)) / self.rounds[arm]
