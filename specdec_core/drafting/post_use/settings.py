"""The settings of draft models that use their tokens again."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specdec_core.config import (
    MOST_NODES,
    AnyPolicy,
    DrafterSettings,
    PolicyDrafterSettings,
    RecordingFacts,
)
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.token_cache import TokenCacheSettings


class PostUseSettings(PolicyDrafterSettings):
    """A draft model with a token cache: reused at the draft model (Post-use, Alg. 2) and after
    the last tokens of the draft at the target (Alg. 3)."""

    kind: Literal["post_use"] = "post_use"
    policy: AnyPolicy = FixedSettings(max_tokens=12)
    at_draft: int = Field(default=3, ge=0, le=16, description="W phrases at the draft model")
    at_target: int = Field(default=3, ge=0, le=16, description="W phrases an anchor at the target")
    anchors: int = Field(default=3, ge=1, le=16, description="m, last tokens of the draft")
    cache: TokenCacheSettings = Field(
        default=TokenCacheSettings(), description="W is `at_draft` and `at_target`, not its own"
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        tokens = self.at_draft * self.cache.phrase_length
        if tokens > MOST_NODES:
            raise ValueError(
                f"{self.kind}: tries {tokens} tokens at the draft model, at most {MOST_NODES} are"
                " possible"
            )

    @property
    def label(self) -> str:
        return f"Post-use, {self.draft_name}, {self.policy.label}"

    @property
    def depth(self) -> int:
        return self.policy.max_tokens + (self.cache.phrase_length if self.at_target else 0)

    @property
    def nodes(self) -> int:
        phrases = self.at_target * self.anchors * self.cache.phrase_length
        return self.policy.max_tokens + phrases

    @property
    def parts(self) -> tuple[DrafterSettings, ...]:
        return (self.cache,)

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        return self.unknown_chain(recording) or self.unknown_part(recording)
