"""The settings of trees that begin with tokens drawn by the target."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import ClassVar, Literal

from pydantic import Field

from specdec_core.config import (
    AnyPolicy,
    Branching,
    ModelSettings,
    PolicyDrafterSettings,
    RecordingFacts,
    Width,
)
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.tree.settings import Children, levels

NOT_RECORDED = "what the target draws to begin a tree with is not recorded"


class TargetTreeSettings(ModelSettings):
    """A tree that begins with `branching[0]` tokens of the target's own, which the draft model
    continues; the longest accepted path wins (improved MCSD, §3.1). With more than one token to
    begin with the output does *not* keep the target's distribution."""

    may_be_lossy: ClassVar = True
    target_started: ClassVar = True

    kind: Literal["target_tree"] = "target_tree"
    branching: Branching = (2, 4, 3, 1, 1)
    replacement: bool = False

    @property
    def children(self) -> Children:
        """The number of children of each node, by level; level 1 are the target's tokens."""
        return levels(self.branching)

    @property
    def label(self) -> str:
        drawn = ", replaced" if self.replacement else ""
        lossy = "" if self.lossless else ", lossy"
        shape = "-".join(map(str, self.branching))
        return f"target tree {shape}, {self.draft_name}{drawn}{lossy}"

    @property
    def lossless(self) -> bool:
        return self.branching[0] == 1

    @property
    def depth(self) -> int:
        return len(self.branching) - 1

    @property
    def nodes(self) -> int:
        return sum(accumulate(self.branching, mul))

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        return NOT_RECORDED


class TargetForkSettings(PolicyDrafterSettings):
    """Chains side by side that begin with `width` tokens of the target's own. All of them grow
    until the policy, such as a decision model, would stop every one of them; the longest accepted
    path wins (improved MCSD, §3.1 to §3.3). With `spread`, several chains follow each of the
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
    def children(self) -> Children:
        """The number of children of each node, by level; level 1 are the target's tokens."""
        return levels((self.width, self.spread, *(1,) * (self.depth - 1)))

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
    def nodes(self) -> int:
        return self.width + self.branches * self.depth

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        return NOT_RECORDED
