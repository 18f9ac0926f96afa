"""The chains that servers draft: of one length, or of one length for each range of load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from specdec_core.config import DrafterSettings
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.schedule.settings import ScheduleSettings


class LoadRange(NamedTuple):
    """K candidates with `low` to `high` requests decoded together; without end for None."""

    low: int
    high: int | None
    tokens: int

    def last(self, most: int) -> int:
        """Its most requests, for a server that cannot say "without end": `most`, or more."""
        return max(most, self.low) if self.high is None else self.high


@dataclass(frozen=True)
class LengthSettings:
    """A draft model's chain of a fixed length, or of one for each range of load."""

    draft: str | None
    spans: tuple[LoadRange, ...]

    @property
    def most(self) -> int:
        """The longest."""
        return max(span.tokens for span in self.spans)

    @property
    def scheduled(self) -> bool:
        return len(self.spans) > 1


def fixed_chain(drafter: DrafterSettings | None) -> LengthSettings | None:
    """The chain that a drafter is: of a fixed length, or a schedule of such with one draft. None
    for other drafters."""
    if isinstance(drafter, ScheduleSettings):
        return _scheduled(drafter)
    if type(drafter) is DraftModelSettings and isinstance(drafter.policy, FixedSettings):
        return LengthSettings(drafter.draft, (LoadRange(1, None, drafter.policy.max_tokens),))
    return None


def spans(tokens: Mapping[int, int]) -> tuple[LoadRange, ...]:
    """K by the least number of requests, as ranges; neighbours with the same K are one."""
    runs = groupby(tokens.items(), key=lambda item: item[1])
    starts = [(next(run)[0], k) for k, run in runs]
    ended = [(low, after - 1, k) for (low, k), (after, _) in pairwise(starts)]
    low, k = starts[-1]
    return tuple(LoadRange(*span) for span in [*ended, (low, None, k)])


def _scheduled(schedule: ScheduleSettings) -> LengthSettings | None:
    tokens: dict[int, int] = {}
    drafts = set()
    for least, drafter in schedule.ranges.items():
        chain = fixed_chain(drafter) if drafter is not None else None
        if drafter is not None and (chain is None or chain.scheduled):
            return None
        tokens[least] = chain.most if chain else 0
        drafts |= {chain.draft} if chain else set()
    return LengthSettings(drafts.pop(), spans(tokens)) if len(drafts) == 1 else None
