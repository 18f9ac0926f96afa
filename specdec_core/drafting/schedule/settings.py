"""The settings of a schedule: a drafter for each range of load."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from specdec_core.config import AnyDrafter, DrafterSettings
from specdec_core.config.drafters import ArmsSettings, read_arm


class ScheduleSettings(ArmsSettings):
    """A drafter by the number of requests decoded together: `ranges[n]` from n requests on, up to
    the next larger key; null drafts nothing. With more requests a forward of several tokens each
    stops being nearly free, so that other drafters, or none, are the fastest.

    In a file a drafter may be given in the ways of a bandit's arms.
    """

    kind: Literal["schedule"] = "schedule"
    ranges: dict[Annotated[int, Field(ge=1)], AnyDrafter | None]

    @field_validator("ranges", mode="before")
    @classmethod
    def _read(cls, ranges: Any) -> Any:
        if not isinstance(ranges, dict):
            return ranges
        return {least: value and read_arm(value) for least, value in ranges.items()}

    @field_validator("ranges")
    @classmethod
    def _in_order(
        cls, ranges: dict[int, DrafterSettings | None]
    ) -> dict[int, DrafterSettings | None]:
        if 1 not in ranges:
            raise ValueError("no drafter for 1 request, with which it has to begin")
        if not any(ranges.values()):
            raise ValueError("drafts nothing at any number of requests")
        return dict(sorted(ranges.items()))

    def __hash__(self) -> int:
        return hash(tuple(self.ranges.items()))

    def at(self, requests: int) -> DrafterSettings | None:
        """The drafter when `requests` are decoded together; None: no drafter."""
        return next(d for least, d in reversed(self.ranges.items()) if least <= requests)

    @property
    def label(self) -> str:
        return f"{len(self.ranges)} ranges of load, from {'/'.join(map(str, self.ranges))} on"

    @property
    def parts(self) -> tuple[DrafterSettings, ...]:
        return tuple(dict.fromkeys(d for d in self.ranges.values() if d is not None))
