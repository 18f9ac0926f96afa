"""The settings of a draft model's chain."""

from __future__ import annotations

from typing import Literal

from specdec_core.config import AnyPolicy, ChainSettings, RecordingFacts
from specdec_core.drafting.policies.fixed import FixedSettings


class DraftModelSettings(ChainSettings):
    """A small language model drafts a chain; the policy says when to stop."""

    kind: Literal["draft_model"] = "draft_model"
    policy: AnyPolicy = FixedSettings()

    @property
    def label(self) -> str:
        return f"{self.draft_name}, {self.policy.label}"

    @property
    def family(self) -> str:
        return self.policy.kind

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        return self.unknown_chain(recording)
