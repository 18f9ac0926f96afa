"""The settings of a draft model's chain."""

from __future__ import annotations

from typing import Literal

from specdec_core.config import (
    AnyLookup,
    AnyPolicy,
    ChainSettings,
    DrafterSettings,
    LookupSettings,
)
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings


class DraftModelSettings(ChainSettings):
    """A small language model drafts a chain; the policy decides when to stop."""

    kind: Literal["draft_model"] = "draft_model"
    policy: AnyPolicy = FixedSettings()

    @property
    def label(self) -> str:
        return f"{self.draft_name}, {self.policy.label}"

    @property
    def family(self) -> str:
        return self.policy.kind


class CascadeSettings(ChainSettings):
    """A draft model's chain, itself sped up: cheap proposals are verified against the draft model
    by the rule that the target applies, several tokens a forward."""

    kind: Literal["cascade"] = "cascade"
    policy: AnyPolicy = FixedSettings()
    proposer: AnyLookup = PromptLookupSettings(max_tokens=4)

    @property
    def label(self) -> str:
        lookup = self.proposer.kind.replace("_", " ")
        return f"cascade {self.draft_name} + {lookup}, {self.policy.label}"

    @property
    def name(self) -> str:
        return f"cascade {self.draft_name}"

    @property
    def parts(self) -> tuple[DrafterSettings, ...]:
        return (self.proposer,)

    @property
    def guesses(self) -> LookupSettings:
        return self.proposer
