"""What the draft and the target did when, for a trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class TimelineSpan:
    """Work of one side, in seconds on the target's clock."""

    by: str  # "draft" or "target"
    what: str  # "draft", "verify", "wait", "talk"
    start: float
    end: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start
