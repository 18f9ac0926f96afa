"""The gain of asynchronous drafting: PEARL against the chains of one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from specdec_core.config import Configuration, DrafterSettings, PairSpec, Sampling, distinct_labels
from specdec_core.drafting.draft_model.settings import CascadeSettings, DraftModelSettings
from specdec_core.drafting.hybrid import HybridSettings
from specdec_core.drafting.pearl.settings import PearlSettings
from specdec_core.drafting.pearl.timeline import TimelineSpan
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.tokens.statistics import Counts, Generation, Ratio, paired_ratio

# The fields of :class:`specdec_core.tokens.statistics.Round` with the seconds of its parts.
PARTS = {
    "draft forwards": "draft_forward_seconds",
    "target forward": "target_forward_seconds",
    "verification": "verify_seconds",
    "policy": "policy_seconds",
    "bookkeeping": "bookkeeping_seconds",
}


@dataclass
class OverlapContestant:
    """One configuration in one process, and its times: seconds [repeat][prompt]."""

    name: str
    bench: Any  # the actor that decodes
    configuration: Configuration
    seconds: list[list[float]] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)

    @property
    def tokens(self) -> np.ndarray:
        return np.array([max(len(g.tokens), 1) for g in self.generations])

    @property
    def tokens_per_second(self) -> float:
        return float(self.tokens.sum() / np.median(self.seconds, axis=0).sum())

    def over(self, other: OverlapContestant) -> Ratio:
        """How many times faster it is than another one."""
        seconds = np.array(self.seconds) * (other.tokens / self.tokens)
        return paired_ratio(np.array(other.seconds), seconds)


@dataclass
class Overlap:
    """A finished comparison: all contestants, autoregressive decoding first, and the spans of one
    request in PEARL."""

    spec: PairSpec
    contestants: list[OverlapContestant]
    spans: list[TimelineSpan]

    def best(self, name: str) -> OverlapContestant:
        """The fastest chain of those called `name`."""
        chains = [c for c in self.contestants if c.name == name and c.configuration.drafter]
        return max(chains, key=lambda c: c.tokens_per_second)

    def frame(self) -> pd.DataFrame:
        """A row for each contestant. `differing` are outputs that differ from autoregressive
        decoding's. The parts are those of a mean round after the first, which reads the prompt."""
        first = self.contestants[0]
        labels = distinct_labels(c.configuration for c in self.contestants)
        rows = []
        for contestant in self.contestants:
            ratio = Ratio(1.0, 1.0, 1.0) if contestant is first else contestant.over(first)
            texts = zip(contestant.generations, first.generations, strict=True)
            rounds = [r for g in contestant.generations for r in g.rounds[1:]]
            parts = {
                part: 1e3 * float(np.mean([getattr(r, name) for r in rounds]))
                for part, name in PARTS.items()
            }
            rows.append(
                {
                    "where": contestant.name,
                    "configuration": labels[contestant.configuration.id],
                    "config_id": contestant.configuration.id,
                    "tokens_per_second": contestant.tokens_per_second,
                    "speedup": ratio.value,
                    "low": ratio.low,
                    "high": ratio.high,
                    "mat": Counts.of(contestant.generations).metrics()["mat"],
                    "differing": sum(a.tokens != b.tokens for a, b in texts),
                    **{f"{part} (ms)": value for part, value in parts.items()},
                }
            )
        return pd.DataFrame(rows)


ONE, TWO, PEARL = "one thread", "two threads", "draft beside target"


def chains(
    drafts: Iterable[str], lengths: Iterable[int], lookups: bool
) -> Iterator[DrafterSettings]:
    """Chains of each length, drafted and verified in turns."""
    for draft, length in product(drafts, lengths):
        policy = FixedSettings(max_tokens=length)
        chain = DraftModelSettings(draft=draft, policy=policy)
        yield from _with_lookups(chain, CascadeSettings(draft=draft, policy=policy), lookups)


def asynchronous(drafts: Iterable[str], window: int, lookups: bool) -> Iterator[DrafterSettings]:
    """PEARL: drafting while the target verifies `window` candidates at most."""
    for draft in drafts:
        policy = FixedSettings(max_tokens=window)
        chain = DraftModelSettings(draft=draft, policy=policy)
        cascade = CascadeSettings(draft=draft, policy=policy)
        alone = PearlSettings(drafter=chain, window=window)
        sped_up = PearlSettings(drafter=cascade, window=window)
        yield from _with_lookups(alone, sped_up, lookups)
        yield PearlSettings(drafter=chain, window=window, wait=0)
        yield PearlSettings(drafter=chain, window=window, width=4)


def under(sampling: Sampling, drafters: Iterable[DrafterSettings]) -> Iterator[Configuration]:
    """Each drafter with the same sampling."""
    return (Configuration(drafter=drafter, sampling=sampling) for drafter in drafters)


def _with_lookups(
    chain: DrafterSettings, sped_up: DrafterSettings, lookups: bool
) -> Iterator[DrafterSettings]:
    """A chain by itself and, with `lookups`, a chain sped up by a lookup in the draft: alone, only
    where a lookup in the text finds nothing, and merged with that lookup's match as a branch."""
    yield chain
    if lookups:
        yield sped_up
        for merge in (False, True):
            yield HybridSettings(otherwise=sped_up, merge=merge)
