"""The settings of a fork that the target begins."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from specdec_core.config import AnyPolicy, PolicyDrafterSettings, RecordingFacts, Width
from specdec_core.drafting.policies.fixed import FixedSettings


class TargetForkSettings(PolicyDrafterSettings):
    """Chains side by side that begin with `width` tokens of the target's own and go on together
    until the policy, such as a decision model, would stop every one of them; the longest accepted
    path wins (improved MCSD, §3.1 to §3.3). With `spread`, several chains go on from each of the
    target's tokens (§5). With more than one token to begin with the output does *not* keep the
    target's distribution."""

    may_be_lossy: ClassVar = True
    target_started: ClassVar = True

    kind: Literal["target_fork"] = "target_fork"
    policy: AnyPolicy = FixedSettings(max_tokens=5)
    width: Width = Field(default=16, description="tokens of the target's own; 1 is lossless")
    spread: Width = Field(default=1, description="chains after each of them")
    replacement: bool = False

    @property
    def label(self) -> str:
        shape = f"{self.width}×{self.spread}" if self.spread > 1 else f"{self.width}"
        drawn = ", replaced" if self.replacement else ""
        lossy = "" if self.lossless else ", lossy"
        return f"target fork {shape}, {self.draft_name}, {self.policy.label}{drawn}{lossy}"

    @property
    def lossless(self) -> bool:
        return self.width == 1

    @property
    def branches(self) -> int:
        """Chains side by side."""
        return self.width * self.spread

    @property
    def depth(self) -> int:
        return self.policy.max_tokens

    @property
    def nodes(self) -> int:
        return self.width + self.branches * self.depth

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        return "what the target draws to begin a tree with is not recorded"
