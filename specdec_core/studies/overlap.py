"""What drafting beside the target gains: PEARL against the chains of one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from specdec_core.config import Configuration, PairSpec, distinct_labels
from specdec_core.drafting.pearl.timeline import Span
from specdec_core.studies.time_shares import PARTS
from specdec_core.tokens.statistics import Counts, Generation, Ratio, paired_ratio


@dataclass
class Contestant:
    """One configuration in one process, and what it took: seconds [repeat][prompt]."""

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

    def over(self, other: Contestant) -> Ratio:
        """How many times faster it is than another one."""
        own = np.array(self.seconds) * (other.tokens / self.tokens)
        return paired_ratio(np.array(other.seconds), own)


@dataclass
class Overlap:
    """A finished comparison: everybody, autoregressive decoding first, and a look at PEARL."""

    spec: PairSpec
    contestants: list[Contestant]
    spans: list[Span]

    def best(self, name: str) -> Contestant:
        """The fastest chain of those called `name`."""
        chains = [c for c in self.contestants if c.name == name and c.configuration.drafter]
        return max(chains, key=lambda c: c.tokens_per_second)

    def frame(self) -> pd.DataFrame:
        """A row for each contestant. `differing` are outputs unlike autoregressive decoding's."""
        first = self.contestants[0]
        labels = distinct_labels(c.configuration for c in self.contestants)
        rows = []
        for own in self.contestants:
            ratio = Ratio(1.0, 1.0, 1.0) if own is first else own.over(first)
            texts = zip(own.generations, first.generations, strict=True)
            rounds = [r for g in own.generations for r in g.rounds]
            parts = {
                part: 1e3 * float(np.mean([getattr(r, name) for r in rounds]))
                for part, name in PARTS.items()
            }
            rows.append(
                {
                    "where": own.name,
                    "configuration": labels[own.configuration.id],
                    "config_id": own.configuration.id,
                    "tokens_per_second": own.tokens_per_second,
                    "speedup": ratio.value,
                    "low": ratio.low,
                    "high": ratio.high,
                    "mat": Counts.of(own.generations).metrics()["mat"],
                    "differing": sum(a.tokens != b.tokens for a, b in texts),
                    **{f"{part} (ms)": value for part, value in parts.items()},
                }
            )
        return pd.DataFrame(rows)


ONE, TWO, PEARL = "one thread", "two threads", "draft beside target"
