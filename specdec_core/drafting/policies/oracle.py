"""Stop just before the next rejection."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from specdec_core.config import MOST_TOKENS, MaxTokens, PolicySettings, RecordingFacts
from specdec_core.drafting.policies.policy import LengthPolicy, RecordedLengths


class OracleSettings(PolicySettings):
    """Stop just before the next rejection (SpecDec++, Thm 4.1). Only a replay knows when. At its
    default `max_tokens` is no bound: the theorem has none."""

    kind: Literal["oracle"] = "oracle"
    max_tokens: MaxTokens = MOST_TOKENS

    replayed: ClassVar = True

    @property
    def label(self) -> str:
        return f"oracle{self.up_to}"

    @property
    def decodes(self) -> bool:
        return False

    def unsupported_reason(self, recording: RecordingFacts) -> str | None:
        return None  # a draft that agrees is the recorded output, however long


class OraclePolicy(LengthPolicy):
    """As many candidates as the target would accept, from a recording."""

    def lengths(self, draft: RecordedLengths) -> np.ndarray:
        most = self.settings.max_tokens
        return draft.agreeing if most == MOST_TOKENS else np.minimum(draft.agreeing, most)
