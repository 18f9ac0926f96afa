"""A ranking by replay compared with the program itself: its settings timed interleaved.

For each way in which a server drafts (a draft model, a lookup with some n-grams), its lengths are
timed beside autoregressive decoding, on the prompts that were recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import Field

from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.config import Configuration, Document, DrafterSettings, PairSpec, distinct_labels
from specdec_core.evidence.bench.result import BenchRow
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.search.results import Trial
from specdec_core.tokens.statistics import Ratio, paired_ratio

FIXED = ("suffix",)  # vLLM takes their length at its start only


class Scanned(Document):
    """A setting: the speedup that replay and a profile expect, the tokens of a step that replay
    counts, and its times in the program."""

    configuration: Configuration
    settings: dict[str, Any]
    expected: float
    expected_tokens: float | None = None
    row: BenchRow


class ScanResult(Document):
    """Settings of a server in the order of their expected speed, autoregressive decoding included,
    and everything that decides how they were timed."""

    name: str
    started: datetime
    server: str
    pair: PairSpec
    prompts: PromptSet
    max_new_tokens: int
    repeats: int
    times: str  # the device of the forward times behind the expectation
    recording: str
    scanned: list[Scanned]
    environment: dict[str, str] = Field(default={})

    @property
    def labels(self) -> list[str]:
        names = distinct_labels(each.configuration for each in self.scanned)
        return [names[each.configuration.id] for each in self.scanned]

    @property
    def speeds(self) -> list[float]:
        """Tokens a second of each."""
        return [each.row.tokens_per_second for each in self.scanned]

    @property
    def first(self) -> Scanned:
        """What the ranking chooses."""
        return self.scanned[0]

    @property
    def best(self) -> Scanned:
        """The fastest that was timed."""
        return self.scanned[int(np.argmax(self.speeds))]

    @property
    def spearman(self) -> float:
        """The rank correlation between expected and measured speed."""
        expected = pd.Series([each.expected for each in self.scanned])
        return float(expected.corr(pd.Series(self.speeds), method="spearman"))

    @property
    def regret(self) -> float:
        """The share of the best's speed that the ranking's first choice lacks."""
        return 1 - self.first.row.tokens_per_second / max(self.speeds)

    def over(self, each: Scanned, other: Scanned) -> Ratio:
        """How many times faster `each` is than `other`."""
        return paired_ratio(other.row.seconds_per_token, each.row.seconds_per_token)

    @property
    def plain(self) -> Scanned:
        """Autoregressive decoding."""
        return next(each for each in self.scanned if each.configuration.drafter is None)

    def save(self, folder: Path) -> Path:
        return write_atomically(folder / "scan.json", self.model_dump_json(indent=1))


def scanned_settings(ranked: Sequence[Trial], lengths: Iterable[int]) -> list[Trial]:
    """The settings of a ranking that are timed, in its order: autoregressive decoding and, for each
    kind of drafter with each draft and policy, the fastest setting, and its variant (n-grams,
    thresholds) at all `lengths`. Of a kind in :data:`FIXED` only the fastest setting is timed.

    Raises:
        UserError: the ranking has nothing that drafts at these lengths.
    """
    lengths, chosen = set(lengths), []
    ways: dict[tuple[str, ...], str] = {}
    for trial in ranked:
        drafter = trial.configuration.drafter
        if drafter is None:
            chosen.append(trial)
            continue
        policies = (policy.kind for _, policy in trial.configuration.policies)
        way = drafter.kind, trial.configuration.draft or "", *policies
        variant, length = _variant(drafter)
        seen = way in ways
        fastest = ways.setdefault(way, variant)
        if not seen or (variant == fastest and length in lengths and way[0] not in FIXED):
            chosen.append(trial)
    if len(chosen) < 3:
        raise UserError(f"nothing to scan at lengths {', '.join(map(str, sorted(lengths)))}")
    return chosen


def _variant(drafter: DrafterSettings) -> tuple[str, int]:
    """All of a drafter's settings but its length, and that."""
    content = drafter.model_dump(mode="json")
    policy = content.get("policy")
    if isinstance(policy, dict):
        policy.pop("max_tokens", None)
    content.pop("max_tokens", None)
    return repr(content), drafter.depth
