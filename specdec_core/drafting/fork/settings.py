"""The settings of a fork."""

from __future__ import annotations

from typing import Literal

from specdec_core.config import AnyPolicy, PolicyDrafterSettings, RecordingFacts, Width
from specdec_core.drafting.policies.fixed import FixedSettings


class ForkSettings(PolicyDrafterSettings):
    """Chains, `width` of them, that part at the first token and go on together until the policy
    would stop every one of them (improved MCSD, §3.2 and §3.3)."""

    kind: Literal["fork"] = "fork"
    policy: AnyPolicy = FixedSettings()
    width: Width = 4
    replacement: bool = False

    @property
    def label(self) -> str:
        drawn = ", replaced" if self.replacement else ""
        return f"fork {self.width}, {self.draft_name}, {self.policy.label}{drawn}"

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """How many children each node of each level has at full depth, the sequence's last token
        being level 0."""
        return (self.width,), *((1,) * self.width,) * (self.depth - 1)

    @property
    def branches(self) -> int:
        """Chains side by side."""
        return self.width

    @property
    def depth(self) -> int:
        return self.policy.max_tokens

    @property
    def nodes(self) -> int:
        return self.width * self.depth

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        if not isinstance(self.policy, FixedSettings):
            return "a fork's policy looks at all branches, only the accepted one is recorded"
        return self.unknown_tree(recording, whole)
