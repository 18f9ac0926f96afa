"""The settings of drafting phrase by phrase."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specdec_core.config import MaxTokens, ModelSettings, RecordingFacts, Width
from specdec_core.drafting.post_use.settings import check_tried


class OuroborosSettings(ModelSettings):
    """Drafts phrase by phrase, and verified phrases lengthen the draft (Ouroboros, Zhao et al.,
    2024)."""

    kind: Literal["ouroboros"] = "ouroboros"
    max_tokens: MaxTokens = 12
    phrases: Width = Field(default=3, description="K, phrases tried after the draft")
    phrase_length: int = Field(default=5, ge=1, le=32, description="β, tokens of a phrase")
    window: int = Field(default=6, ge=1, le=32, description="guesses iterated at the draft model")
    pool: int = Field(default=1000, ge=1)
    per_key: int = Field(default=20, ge=1)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        check_tried(self.kind, self.phrases * self.phrase_length + self.window)

    @property
    def label(self) -> str:
        return f"Ouroboros, {self.draft_name}, K={self.max_tokens}"

    @property
    def remembers(self) -> bool:
        return True

    @property
    def depth(self) -> int:
        return self.max_tokens + self.phrase_length

    @property
    def nodes(self) -> int:
        return self.max_tokens + self.phrases * self.phrase_length

    @property
    def reads_rejected(self) -> bool:
        return True

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        return "the draft's tokens after phrases that it rejects are not recorded"
