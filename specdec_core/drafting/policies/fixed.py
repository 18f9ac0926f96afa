"""K candidates every round."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from specdec_core.config import MaxTokens, PolicySettings
from specdec_core.drafting.policies.policy import LengthPolicy, RecordedLengths


class FixedSettings(PolicySettings):
    """K candidate tokens every round (Leviathan et al., 2023)."""

    kind: Literal["fixed"] = "fixed"
    max_tokens: MaxTokens = 5

    replayed: ClassVar = True

    @property
    def label(self) -> str:
        return f"K={self.max_tokens}"


class FixedPolicy(LengthPolicy):
    """K candidates, regardless of their tokens."""

    def lengths(self, draft: RecordedLengths) -> np.ndarray:
        return np.full_like(draft.agreeing, self.settings.max_tokens)
