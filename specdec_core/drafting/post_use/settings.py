"""The settings of draft models that use their tokens again."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specdec_core.config import (
    MOST_NODES,
    AnyPolicy,
    DrafterSettings,
    MaxTokens,
    ModelSettings,
    PolicyDrafterSettings,
    RecordingFacts,
    Width,
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
        check_tried(self.kind, self.at_draft * self.cache.phrase_length)

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
    def post_use(self) -> PostUseSettings:
        """Its phrases, at the draft model and at the target, as Post-use."""
        cache = TokenCacheSettings(
            phrases=self.phrases,
            phrase_length=self.phrase_length,
            pool=self.pool,
            per_key=self.per_key,
            memory="all",
        )
        return PostUseSettings.model_construct(
            draft=self.draft,
            policy=FixedSettings(max_tokens=self.max_tokens),
            at_draft=self.phrases,
            at_target=self.phrases,
            anchors=1,
            cache=cache,
        )

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


def check_tried(kind: str, tokens: int) -> None:
    """Raises ValueError where the draft model cannot try this many tokens at once."""
    if tokens > MOST_NODES:
        raise ValueError(
            f"{kind}: tries {tokens} tokens at the draft model, at most {MOST_NODES} are possible"
        )
