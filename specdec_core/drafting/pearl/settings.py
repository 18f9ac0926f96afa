"""The settings of asynchronous drafting (PEARL)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specdec_core.config import AnyChain, DrafterSettings, MaxTokens, RecordingFacts
from specdec_core.drafting.draft_model.settings import DraftModelSettings


class PearlSettings(DrafterSettings):
    """A draft model, alone or sped up by a lookup, drafts on another device while the target
    verifies (PEARL)."""

    kind: Literal["pearl"] = "pearl"
    drafter: AnyChain = DraftModelSettings()
    window: MaxTokens = Field(default=12, description="candidates verified at once at most")
    wait: int | None = Field(
        default=None,
        ge=0,
        description="candidates waited for after a rejection; 0: none, as PEARL's"
        " pre-verification; unset: as many as pay, by the forwards' times",
    )
    width: int = Field(
        default=1,
        ge=1,
        le=16,
        description="tokens that a forward of the draft reads: the last candidate, and alternatives"
        " that the target may choose instead of a candidate. For devices where a forward of a few"
        " tokens takes as long as one of a single token; 1 is PEARL as published",
    )
    least: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="the least probability, by the draft, of an alternative that is read",
    )

    def model_post_init(self, _: Any) -> None:
        if self.wait is not None and self.wait > self.window:
            raise ValueError(f"pearl: wait {self.wait} exceeds window {self.window}")

    @property
    def label(self) -> str:
        width = f", width {self.width}" if self.width > 1 else ""
        window = f", window {self.window}" if self.window != 12 else ""
        return f"PEARL {self.drafter.name}, {self.drafter.policy.label}{window}{width}"

    @property
    def depth(self) -> int:
        # The last one is verified, but not fed.
        return self.window + 1

    @property
    def ahead(self) -> int:
        """The most tokens drafted beyond the confirmed sequence: a window that is being verified,
        and the next."""
        return 2 * self.window + 1

    @property
    def parts(self) -> tuple[DrafterSettings, ...]:
        return (self.drafter,)

    @property
    def asynchronous(self) -> bool:
        return True

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        return "which candidates have arrived when depends on time"
