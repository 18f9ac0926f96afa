"""The settings of a bandit over drafters."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from specdec_core.config import AnyDrafter, DrafterSettings, Memory, RecordingFacts
from specdec_core.config.drafters import ArmsSettings, read_arm


class BanditSettings(ArmsSettings):
    """Chooses a drafter for each round and learns from what was accepted: the rules of BanditSpec,
    and Thompson sampling.

    In a file an arm may be a drafter, a policy (of the first draft model), a whole number K, or a
    whole configuration.
    """

    kind: Literal["bandit"] = "bandit"
    rule: Literal["ucb", "exp3", "thompson"] = "ucb"
    reward: Literal["tokens", "time"] = Field(
        default="tokens", description="tokens a round (the paper's), or tokens a millisecond"
    )
    confidence: float = Field(default=0.05, gt=0, lt=1, description="δ of UCBSpec by tokens")
    exploration: float = Field(default=1.0, ge=0, description="scales UCBSpec's confidence radius")
    memory: Memory = "all"
    state: str | None = Field(default=None, description="a saved state to start from")
    seed: int = Field(default=0, ge=0)
    arms: tuple[AnyDrafter, ...]

    @field_validator("arms", mode="before")
    @classmethod
    def _read_arms(cls, arms: Any) -> Any:
        return [read_arm(arm) for arm in arms] if isinstance(arms, list | tuple) else arms

    @field_validator("arms")
    @classmethod
    def _enough(cls, arms: tuple[AnyDrafter, ...]) -> tuple[AnyDrafter, ...]:
        if len(set(arms)) < 2 or len(set(arms)) < len(arms):
            raise ValueError("a bandit chooses among at least two arms, each given once")
        return arms

    @property
    def label(self) -> str:
        rule = {"ucb": "UCB", "exp3": "EXP3", "thompson": "Thompson"}[self.rule]
        memory = ", each request" if self.memory == "request" else ""
        timed = ", by time" if self.reward == "time" else ""
        scaled = "" if self.exploration == 1 else f", exploration {self.exploration:g}"
        return f"{rule} of {len(self.arms)} arms{timed}{memory}{scaled}"

    @property
    def family(self) -> str:
        return f"{self.rule}_time" if self.reward == "time" else self.rule

    @property
    def parts(self) -> tuple[DrafterSettings, ...]:
        return self.arms

    @property
    def states(self) -> tuple[str, ...]:
        return () if self.state is None else (self.state,)

    @property
    def keeps_state(self) -> bool:
        return self.memory == "all"

    @property
    def remembers(self) -> bool:
        return self.memory == "all" or super().remembers

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        if self.reward == "time" and not recording.timed:
            return "a bandit that is rewarded in time needs a profile"
        return super().unsupported_reason(recording, whole)
