"""The settings of a tree that the target begins."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import ClassVar, Literal

from specdec_core.config import Branching, ModelSettings, RecordingFacts
from specdec_core.config.drafters import shape


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
    def label(self) -> str:
        drawn = ", replaced" if self.replacement else ""
        lossy = "" if self.lossless else ", lossy"
        return f"target tree {shape(self.branching)}, {self.draft_name}{drawn}{lossy}"

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
        return "what the target draws to begin a tree with is not recorded"
