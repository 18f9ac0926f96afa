"""Another machine's forward times, from a YAML file instead of a measurement.

```yaml
name: two A100                # shown to people
target:
  speculative: 0.112          # seconds of a forward inside draft-verify rounds
  alone: 0.108                # seconds of a forward when decoding without a draft
drafts:
  small: 0.0234               # seconds of a draft forward; "*" stands for every other draft
```

One number as `target` is both times. A forward takes the same time whatever its width, context and
batch, as Eq. 3.1 of SpecDec++ assumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, field_validator

from specdec_core.base.errors import UserError
from specdec_core.config import Value, load_yaml, parse
from specdec_core.cost.forward import ForwardCost
from specdec_core.cost.profile import Profile

ANY = "*"

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TargetSeconds(Value):
    """Seconds of a target forward in the two ways of decoding."""

    speculative: Seconds = Field(description="of a forward that verifies candidates")
    alone: Seconds = Field(description="of a forward of autoregressive decoding")


class Hardware(Value):
    """Forward times of a pair on another machine. One number as `target` is both of its times."""

    name: str = Field(description="shown in reports")
    target: TargetSeconds
    drafts: dict[str, Seconds] = Field(
        min_length=1, description='seconds of a forward by draft; "*" is every other draft'
    )
    _source: str = PrivateAttr(default="hardware")

    @field_validator("target", mode="before")
    @classmethod
    def _one_time_is_both(cls, value: Any) -> Any:
        number = isinstance(value, int | float | str)
        return {"speculative": value, "alone": value} if number else value

    @field_validator("drafts", mode="before")
    @classmethod
    def _names_as_text(cls, value: Any) -> Any:
        # YAML reads a draft called 7 as a number.
        return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else value

    def t_draft(self, draft: str) -> float:
        """Seconds of a forward of `draft`; one without a time is a :class:`UserError`."""
        seconds = self.drafts.get(draft, self.drafts.get(ANY))
        if seconds is None:
            raise UserError(
                f"{self._source}: drafts.{draft}: no time given (only for {', '.join(self.drafts)};"
                f' "{ANY}" would stand for every draft)'
            )
        return seconds

    def profile(self, drafts: Sequence[str]) -> Profile:
        """This machine's profile for a pair with `drafts`."""
        return Profile(
            target=ForwardCost.constant(self.target.speculative),
            drafts={draft: ForwardCost.constant(self.t_draft(draft)) for draft in drafts},
            device=self.name,
            target_dtype="unknown",
            draft_dtype="unknown",
            autoregressive_forward=self.target.alone,
        )


def load_hardware(path: str | Path) -> Hardware:
    """Read a hardware file; a missing or malformed one is a :class:`UserError` that names the file
    and the key."""
    hardware = parse(Hardware, load_yaml(path), str(path))
    hardware._source = str(path)
    return hardware
