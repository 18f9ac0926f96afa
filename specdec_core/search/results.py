"""A sweep's result: the document that the report, MLflow and the command line read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, PrivateAttr

from specdec_core.config import Configuration, Document, PairSpec, Stored, distinct_labels
from specdec_core.cost import Profile
from specdec_core.drafting.policies.oracle import OracleSettings
from specdec_core.measure.paired import paired_ratio
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.search.load.result import LoadChoice
from specdec_core.tokens.statistics import Counts, Generation, Ratio, as_long

METRIC = "estimated_speedup"
SECONDS = "estimated_seconds"
NOTABLE = 50  # replayed configurations, of perhaps thousands, that are kept in full detail
ORACLE = OracleSettings.model_fields["kind"].default


class Trial(Document):
    """One configuration and its counts (load-independent) over the prompt set."""

    configuration: Configuration
    counts: dict[str, int]  # of Counts
    metrics: dict[str, float]  # Counts.metrics(), estimated_speedup and estimated_seconds
    finished: bool = True  # False when a scheduler stopped it early
    replayed: bool = False  # counted from a recording, without a model

    @classmethod
    def of(
        cls,
        configuration: Configuration,
        counts: Counts,
        profile: Profile,
        context: float,
        prompts: Iterable[int] = (),
        replayed: bool = False,
        by_arm: Iterable[tuple[int | None, Counts]] = (),
        taken: float | None = None,
    ) -> Trial:
        """Counts, their rates, and the time that the profile predicts from them at `context` tokens
        in the cache, prefilling prompts of `prompts` tokens included. `by_arm` has the counts of
        each arm of a bandit, which has its own costs and perhaps another draft model; None: of
        rounds without an arm. An arm may have several counts: of rounds that verify as many
        candidates each, they are priced more exactly than by a mean of several widths. `taken` are
        seconds that decoding took, in place of the predicted ones."""
        prompts, by_arm = list(prompts), list(by_arm) or [(None, counts)]
        if (seconds := taken) is None:
            seconds = profile.prefill_seconds(prompts, configuration.drafts)
            for arm, rounds in by_arm:
                own = configuration.by(arm)
                seconds += profile.under(own).estimate_seconds(rounds, own.draft, context)
        alone = profile.autoregressive_seconds(counts.n, context) + profile.prefill_seconds(prompts)
        speedup = alone / seconds if seconds else 1.0
        return cls(
            configuration=configuration,
            counts=counts.as_dict(),
            metrics={**counts.metrics(), METRIC: speedup, SECONDS: seconds},
            replayed=replayed,
        )

    @property
    def id(self) -> str:
        return self.configuration.id

    def may_win(self, allowed: Collection[str] = ()) -> bool:
        """Whether it could be champion if the lossy methods `allowed`, by name, may win: counted in
        full, otherwise lossless, and not the oracle, which only a replay can follow."""
        lossless = self.configuration.lossy_methods <= set(allowed)
        return self.finished and lossless and self.configuration.family != ORACLE


def by_estimate(trials: Iterable[Trial]) -> list[Trial]:
    """Fastest first, by the speedup that the profile predicts."""
    return sorted(trials, key=lambda trial: trial.metrics[METRIC], reverse=True)


class Timing(Document):
    """A configuration timed alone. Repeats of one pass over the prompts were interleaved with those
    of other configurations."""

    config_id: str
    seconds: list[list[float]]  # [repeat][prompt]
    passes: list[int]  # [repeat]
    tokens: list[int]  # [prompt]
    prefill: list[float]  # seconds to the first token [prompt]; 0: unknown
    speedup: float = 1.0  # over autoregressive decoding
    low: float = 1.0
    high: float = 1.0
    tokens_per_second: float
    tied_with_champion: bool = False
    differing_outputs: int = 0  # greedy outputs unequal to autoregressive (bfloat16 near-ties)

    @classmethod
    def of(
        cls,
        configuration: Configuration,
        seconds: Mapping[int, Sequence[float]],
        generations: Sequence[Generation],
        baseline: tuple[Timing, Sequence[Generation]] | None = None,
    ) -> Timing:
        """`seconds` of each prompt by pass, and the generations of the first pass; with the speedup
        over the timing and generations of `baseline`, autoregressive decoding's."""
        tokens = [len(generation.tokens) for generation in generations]
        timing = cls(
            config_id=configuration.id,
            seconds=[list(of_pass) for of_pass in seconds.values()],
            passes=list(seconds),
            tokens=tokens,
            prefill=[generation.prefill_seconds for generation in generations],
            tokens_per_second=sum(tokens) / float(np.median([*seconds.values()], axis=0).sum()),
        )
        if baseline is not None:
            ratio = timing.over(baseline[0])
            timing.speedup, timing.low, timing.high = ratio.value, ratio.low, ratio.high
            if configuration.sampling.greedy:
                pairs = zip(generations, baseline[1], strict=True)
                timing.differing_outputs = sum(own.tokens != ar.tokens for own, ar in pairs)
        return timing

    def over(self, other: Timing) -> Ratio:
        """How many times faster it is than another timing of the same prompts, for as many tokens
        as the other has: in the passes of both, or without one by what both are over autoregressive
        decoding, with the sum of both intervals."""
        ours, theirs = (dict(zip(each.passes, each.seconds, strict=True)) for each in (self, other))
        both = [number for number in ours if number in theirs]
        if not both:
            value, low, high = self.speedup / other.speedup, self.low / other.high, self.high
            return Ratio(value, low, high / other.low)
        seconds = np.array([ours[number] for number in both])
        seconds = as_long(seconds, self.prefill, self.tokens, other.tokens)
        return paired_ratio(np.array([theirs[number] for number in both]), seconds)


class OraclePoint(Document):
    """The oracle of a draft (SpecDec++, Thm 4.1): no discards, a verification a disagreement."""

    draft: str
    verification_rate: float
    speedup: float  # predicted with the profile


class ReplaySummary(Document):
    """What a sweep counted from a recording, and what that saved."""

    recording: str  # the recording's folder
    configurations: int
    seconds: float  # of the replay stage; of an interrupted sweep, in its last run
    per_second: float  # configurations, in that run
    n_draft: int  # draft forwards that counting them live would have taken
    n_target: int  # target forwards, likewise
    checked: int = 0  # replayed configurations that were timed, and thereby also counted, live
    equal: int = 0  # with equal counts live and replayed
    deviation: float = 0.0  # the largest relative difference in forwards of the rest

    @property
    def forwards_saved(self) -> int:
        return self.n_draft + self.n_target


class RaceSummary(Document):
    """How a race of finalists ended (:mod:`specdec_core.search.race`)."""

    champion: str  # config_id
    in_question: list[str]  # configuration ids that none is shown to be faster than
    prompts: int  # that were timed, further ones included
    laps: int  # a lap is a prompt under every configuration in question
    within: float  # the cost at which the race stops, as a share of the fastest's time, …
    loss: float  # … its expected cost, …
    at_most: float | None  # … and the most that it costs (95 %), where that is known


class SweepResult(Stored):
    """Everything that a sweep found out."""

    FILE: ClassVar[str] = "sweep.json"
    WHAT: ClassVar[str] = "sweep"

    name: str
    started: datetime
    pair: PairSpec
    prompts: PromptSet
    max_new_tokens: int
    profile: Profile
    trials: list[Trial] = Field(default=[])
    oracles: list[OraclePoint] = Field(default=[])
    autoregressive: Timing | None = None
    timings: list[Timing] = Field(default=[])
    champion: str | None = None  # config_id, the fastest for one request at a time
    under_load: LoadChoice | None = None  # of a sweep with a workload
    race: RaceSummary | None = None
    replay: ReplaySummary | None = None
    hardware: str | None = None  # another machine, for which the plan has a profile
    environment: dict[str, str] = Field(default={})  # git commit, hardware, library versions
    mlflow_run_id: str | None = None
    _labels: tuple[Any, dict[str, str]] = PrivateAttr(default=(None, {}))

    @property
    def labels(self) -> dict[str, str]:
        """The configurations' labels by id, all distinct."""
        key = id(self.trials), len(self.trials)  # trials are only ever added
        if self._labels[0] != key:
            self._labels = key, distinct_labels(trial.configuration for trial in self.trials)
        return self._labels[1]

    def trial(self, config_id: str) -> Trial:
        return next(t for t in self.trials if t.id == config_id)

    @property
    def champion_trial(self) -> Trial:
        if self.champion is None:
            raise ValueError(f"sweep {self.name} has no champion")
        return self.trial(self.champion)

    @property
    def served(self) -> Trial:
        """What is registered: the configuration for all loads, where there is a workload, or else
        the champion."""
        if self.under_load is None:
            return self.champion_trial
        return self.trial(self.under_load.chosen.id)

    def notable(self, most: int = NOTABLE) -> list[Trial]:
        """Up to `most` trials with a drafter: first the best of each family with each draft, then
        the fastest by estimate."""
        ranked = by_estimate(t for t in self.trials if t.configuration.drafter is not None)
        leaders: dict[tuple[str, str | None], Trial] = {}
        for trial in ranked:
            leaders.setdefault((trial.configuration.family, trial.configuration.draft), trial)
        first = {trial.id: trial for trial in (*leaders.values(), *ranked)}
        return list(first.values())[:most]
