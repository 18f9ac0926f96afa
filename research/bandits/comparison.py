"""Bandits against each of their arms alone on the same prompts, decoded interleaved or replayed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import zip_longest
from time import perf_counter
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd
from pydantic import Field, model_validator

from research.bandits.regret import Regret, RoundCosts, best_arm, best_of_each, mean_tokens, regret
from research.frames import Rows, framed
from specdec_core.base.errors import UserError
from specdec_core.base.observer import Observer
from specdec_core.config import (
    AUTOREGRESSIVE,
    Configuration,
    DrafterSettings,
    PairSpec,
    Sampling,
    Value,
    distinct_labels,
)
from specdec_core.cost import Profile
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.drafter import Drafter
from specdec_core.engine import Engine, Request
from specdec_core.measure.comparison import interleaved
from specdec_core.measure.paired import paired_ratio
from specdec_core.models.pair import Pair
from specdec_core.recordings.replay import Replay
from specdec_core.tokens.statistics import Generation, Ratio, Round

Kind = Literal["baseline", "arm", "bandit"]
Tokens = tuple[int, ...]
Each = TypeVar("Each")
_WARM_UP_TOKENS = 8


class ArmsPlan(Value):
    """The bandits and arms to compare. In a YAML file `arms` and `sampling` are given once, and a
    bandit is its settings without arms."""

    pair: PairSpec = PairSpec()
    bandits: tuple[Configuration, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _share_arms(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "arms" not in value:
            return value
        rest = {key: entry for key, entry in value.items() if key not in ("arms", "sampling")}
        sampling = {"sampling": value["sampling"]} if "sampling" in value else {}
        shared = {"kind": "bandit", "arms": value["arms"]}
        bandits = rest.get("bandits") or [{}]
        drafters = [{**shared, **bandit} for bandit in bandits]
        return {**rest, "bandits": [{"drafter": drafter, **sampling} for drafter in drafters]}

    @model_validator(mode="after")
    def _same_arms(self) -> ArmsPlan:
        for bandit in self.bandits:
            if not isinstance(bandit.drafter, BanditSettings):
                raise ValueError(f"bandits: {bandit.label} is no bandit")
            if (bandit.drafter.arms, bandit.sampling) != (self.arms, self.sampling):
                raise ValueError("bandits: all must have the same arms and sampling")
        return self

    def under(self, pair: PairSpec, sampling: Sampling) -> ArmsPlan:
        """The same bandits and arms for another pair and sampling."""
        bandits = tuple(b.model_copy(update={"sampling": sampling}) for b in self.bandits)
        return ArmsPlan(pair=pair, bandits=bandits)

    @property
    def sampling(self) -> Sampling:
        return self.bandits[0].sampling

    @property
    def arms(self) -> tuple[DrafterSettings, ...]:
        return settings_of(self.bandits[0]).arms

    @property
    def entrants(self) -> list[BanditEntrant]:
        """Autoregressive decoding, each arm alone, and the bandits."""
        plain = AUTOREGRESSIVE.model_copy(update={"sampling": self.sampling})
        arms = [plain.model_copy(update={"drafter": arm}) for arm in self.arms]
        names = distinct_labels([plain, *arms, *self.bandits])
        return [
            BanditEntrant("baseline", names[plain.id], plain),
            *(BanditEntrant("arm", names[arm.id], arm) for arm in arms),
            *(BanditEntrant("bandit", names[bandit.id], bandit) for bandit in self.bandits),
        ]


def settings_of(bandit: Configuration) -> BanditSettings:
    """The settings of a plan's bandit."""
    assert isinstance(bandit.drafter, BanditSettings)
    return bandit.drafter


def state_name(bandit: Configuration) -> str:
    """The file of a bandit's state, the same whatever state it started from."""
    drafter = settings_of(bandit).model_copy(update={"state": None})
    return f"{bandit.model_copy(update={'drafter': drafter}).id}.json"


def mixed(sets: Iterable[Iterable[Each]]) -> Iterator[Each]:
    """The first of each set, then the second of each, and so on."""
    return (each for turn in zip_longest(*sets) for each in turn if each is not None)


@dataclass
class BanditEntrant:
    """A way to decode the prompts, and its results. Prompts are decoded one at a time, or in
    batches that begin together; such a step is a turn. Lists have one entry a turn."""

    kind: Kind
    name: str
    configuration: Configuration
    turns: list[list[list[Round]]] = field(default_factory=list)  # the rounds of its requests
    outputs: list[list[int]] = field(default_factory=list)  # one a prompt; none in a replay
    seconds: list[list[float]] = field(default_factory=list)  # [repeat][turn]
    state: dict[str, Any] | None = None  # of a bandit, after the last prompt
    drafter: Drafter | None = None

    @property
    def rounds(self) -> list[Round]:
        """All rounds in the order of decoding."""
        return [r for turn in self.turns for r in mixed(turn)]

    @property
    def tokens(self) -> np.ndarray:
        """Generated tokens (turns,)."""
        return np.array(
            [sum(r.generated for rounds in turn for r in rounds) for turn in self.turns]
        )

    @property
    def tokens_per_second(self) -> float:
        """From the median over the repeats of each turn."""
        return float(self.tokens.sum() / np.median(self.seconds, axis=0).sum())

    @property
    def mat(self) -> float:
        """Tokens a round (MAT)."""
        return mean_tokens(self.courses(timed=False))

    def courses(self, timed: bool) -> list[RoundCosts]:
        """The turns, by rounds or by seconds."""
        return [RoundCosts.of(*turn, timed=timed) for turn in self.turns]

    def faster_than(self, other: BanditEntrant) -> Ratio:
        """How many times faster, a token."""
        ours, theirs = (
            np.array(e.seconds) / np.maximum(e.tokens, 1) * other.tokens for e in (self, other)
        )
        return paired_ratio(theirs, ours)


@dataclass(frozen=True)
class ArmComparison:
    """All entrants on the same prompts. `modelled` where a profile gave the times."""

    entrants: list[BanditEntrant]
    modelled: bool = False

    def of(self, kind: Kind) -> list[BanditEntrant]:
        return [entrant for entrant in self.entrants if entrant.kind == kind]

    @cached_property
    def fastest(self) -> BanditEntrant:
        """The arm with the most tokens a second."""
        return max(self.of("arm"), key=lambda arm: arm.tokens_per_second)

    def best(self, timed: bool = False) -> BanditEntrant:
        """The best arm in hindsight: the one with the fewest rounds (the paper's ALG_i*), or with
        the fewest seconds in them."""
        arms = self.of("arm")
        return arms[best_arm([arm.courses(timed) for arm in arms])]

    def regret(self, entrant: BanditEntrant, timed: bool = False) -> Regret:
        """Against the best arm in hindsight, in rounds or in seconds."""
        return regret(entrant.courses(timed), self.best(timed).courses(timed))

    def regret_each(self, entrant: BanditEntrant, timed: bool = False) -> Regret:
        """Against the best arm *for each prompt* in hindsight, the paper's i*(pt, ν), in rounds or
        in seconds. An arm alone has some, too."""
        arms = [arm.courses(timed) for arm in self.of("arm")]
        return regret(entrant.courses(timed), best_of_each(arms))

    @property
    def means(self) -> list[float]:
        """μ of each arm: tokens a round."""
        return [arm.mat for arm in self.of("arm")]

    @property
    def longest(self) -> int:
        """L, the most candidates of any arm."""
        drafters = (arm.configuration.drafter for arm in self.of("arm"))
        return max(drafter.depth for drafter in drafters if drafter is not None)

    @framed
    def table(self) -> Rows:
        """One row an entrant: `kind`, `name`, `mat`, `tokens_per_second`, `speedup` over
        autoregressive decoding, `over_best` (over the fastest arm) with its interval `low`, `high`,
        `regret_rounds` and `regret_seconds` against the best arm in hindsight, `each_rounds` and
        `each_seconds` against the best one for each prompt (NaN for the baseline), and outputs
        `differing` from autoregressive decoding's."""
        [baseline] = self.of("baseline")
        for entrant in self.entrants:
            drafts = entrant is not baseline
            itself = entrant is self.fastest
            over = Ratio(1.0, 1.0, 1.0) if itself else entrant.faster_than(self.fastest)
            pairs = zip(entrant.outputs, baseline.outputs, strict=True)
            yield {
                "kind": entrant.kind,
                "name": entrant.name,
                "mat": entrant.mat,
                "tokens_per_second": entrant.tokens_per_second,
                "speedup": 1.0 if not drafts else entrant.faster_than(baseline).value,
                "over_best": over.value,
                "low": over.low,
                "high": over.high,
                "regret_rounds": self.regret(entrant).total if drafts else math.nan,
                "regret_seconds": self.regret(entrant, True).total if drafts else math.nan,
                "each_rounds": self.regret_each(entrant).total if drafts else math.nan,
                "each_seconds": self.regret_each(entrant, True).total if drafts else math.nan,
                "differing": sum(a != b for a, b in pairs),
            }

    @framed
    def shares(self) -> Rows:
        """One row a bandit and arm: the `rounds` in which it was chosen, their `share` of the
        rounds in which any arm was, and the `tokens` that they added on average."""
        names = [arm.name for arm in self.of("arm")]
        for bandit in self.of("bandit"):
            rounds = [r for r in bandit.rounds if r.arm is not None]
            for number, name in enumerate(names):
                added = [r.generated for r in rounds if r.arm == number]
                yield {
                    "bandit": bandit.name,
                    "arm": name,
                    "rounds": len(added),
                    "share": len(added) / max(len(rounds), 1),
                    "tokens": sum(added) / len(added) if added else math.nan,
                }


def race(
    pair: Pair,
    plan: ArmsPlan,
    prompts: Sequence[Tokens],
    max_new_tokens: int,
    repeats: int = 1,
    slots: int = 1,
    observer: Observer | None = None,
) -> ArmComparison:
    """Decode with all entrants, `slots` prompts a turn. All entrants decode a turn before the next
    turn, each time in another order, so that the machine's load falls on all alike. A bandit learns
    from turn to turn and starts anew with each repeat.

    Rounds, outputs and states are the first repeat's. Raises UserError for a prompt that does not
    fit and for arms that the pair cannot have.
    """
    engine = Engine(pair, slots=slots)
    entrants = plan.entrants
    requests = [Request(str(n), tokens, max_new_tokens, seed=n) for n, tokens in enumerate(prompts)]
    turns = [requests[n : n + slots] for n in range(0, len(requests), slots)]
    short = [Request("warm-up", prompts[0], min(_WARM_UP_TOKENS, max_new_tokens))]
    for entrant in entrants:
        _decode(engine, entrant, short)
    observer = observer or Observer()
    observer.stage("decoding, interleaved", repeats * len(turns))
    for repeat in range(repeats):
        for entrant in entrants:
            entrant.drafter = None
            entrant.seconds.append([])
        for number, turn in enumerate(turns):
            for entrant in interleaved(entrants, repeat * len(turns) + number):
                seconds, generations = _decode(engine, entrant, turn)
                entrant.seconds[repeat].append(seconds)
                if repeat == 0:
                    entrant.turns.append([generation.rounds for generation in generations])
                    entrant.outputs += [generation.tokens for generation in generations]
            observer.step()
        if repeat == 0:
            for entrant in entrants:
                memory = entrant.drafter.memory if entrant.drafter else None
                entrant.state = memory.state() if memory else None
    return ArmComparison(entrants)


def _decode(
    engine: Engine, entrant: BanditEntrant, requests: Sequence[Request]
) -> tuple[float, list[Generation]]:
    """Decode with the entrant's drafter of the turn before, if any."""
    engine.configure(entrant.configuration)
    if entrant.drafter is not None:
        engine.drafter = entrant.drafter
    entrant.drafter = engine.drafter
    start = perf_counter()
    generations = engine.generate(requests)
    return perf_counter() - start, generations


def replay_all(
    replay: Replay, plan: ArmsPlan, profile: Profile, observer: Observer | None = None
) -> ArmComparison:
    """The same from a recording, without a model: rounds are exact, and their times the profile's.
    Decoding can start from the states that the bandits learn.

    Raises:
        UserError: an arm cannot be replayed.
    """
    entrants = plan.entrants
    unknown = [entrant.name for entrant in entrants if not replay.can(entrant.configuration)]
    if unknown:
        raise UserError(f"{replay.recording.folder}: does not tell what {unknown[0]} would do")
    observer = observer or Observer()
    observer.stage("replaying", len(entrants))
    for entrant in entrants:
        replayed = replay.run(entrant.configuration)
        frame = replayed.frame()
        frame["target_seconds"] = _modelled(frame, entrant.configuration, profile, replay)
        rounds: dict[str, list[Round]] = {name: [] for name in replayed.ids}
        for row in frame.drop(columns="round").to_dict("records"):
            values = {str(name): value for name, value in row.items()}
            arm = None if pd.isna(values["arm"]) else int(values["arm"])
            rounds[values.pop("request_id")].append(Round(**{**values, "arm": arm}))
        entrant.turns = [[of_request] for of_request in rounds.values()]
        entrant.seconds = [[course.spent[-1] for course in entrant.courses(timed=True)]]
        entrant.state = replayed.state
        observer.step()
    return ArmComparison(entrants, modelled=True)


def _modelled(
    frame: pd.DataFrame, configuration: Configuration, profile: Profile, replay: Replay
) -> np.ndarray:
    """Seconds (rounds,) of replayed rounds."""
    context = replay.recording.prompts.context

    @cache
    def seconds(arm: int | None, drafted: int, forwards: int, tokens: int) -> float:
        by_arm = configuration.by(arm)
        cost = profile.under(by_arm)
        return cost.round_seconds(drafted, forwards, tokens, by_arm.draft, context)

    arms = [None if pd.isna(arm) else int(arm) for arm in frame["arm"]]
    columns = (frame[name] for name in ("drafted", "draft_forwards", "draft_tokens"))
    return np.array([seconds(*row) for row in zip(arms, *columns, strict=True)])
