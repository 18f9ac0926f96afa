"""What the settings of all length policies have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from specdec_core.config.kinds import POLICIES, KindSettings, OneOf
from specdec_core.config.recorded import RecordingFacts
from specdec_core.config.wording import count

MOST_TOKENS = 20  # SpecDec++'s bound

MaxTokens = Annotated[int, Field(ge=1, le=128, description="candidate tokens a round at most")]


class PolicySettings(KindSettings):
    """What all length policies have in common: `max_tokens`, the most candidate tokens a round."""

    role: ClassVar[str] = "Policy"
    # Whether a recording tells what it would do: whether it decides only by a candidate's token,
    # entropy, probability, largest probabilities and hidden state, and by the rounds' outcomes.
    replayed: ClassVar[bool]

    if TYPE_CHECKING:

        @property
        def max_tokens(self) -> int: ...

    @property
    def up_to(self) -> str:
        """The end of a label."""
        return "" if self.max_tokens == MOST_TOKENS else f" up to {self.max_tokens}"

    @property
    def at_most(self) -> str:
        """The end of a sentence."""
        return (
            "" if self.max_tokens == MOST_TOKENS else f", up to {count(self.max_tokens, 'token')}"
        )

    @property
    def heads(self) -> tuple[str, ...]:
        """The names or folders of its trained heads."""
        return ()

    @property
    def decodes(self) -> bool:
        """Whether it can decode, that is, without knowing what the target will write."""
        return True

    @property
    def reads_rejected(self) -> bool:
        """Whether it learns from the target's tokens after candidates that it rejects."""
        return False

    @property
    def asks_cost(self) -> bool:
        """Whether it takes the cost of a target forward from a profile (:meth:`at_cost`)."""
        return False

    def at_cost(self, target_cost: float) -> PolicySettings:
        """These settings where a target forward costs `target_cost` drafting steps."""
        return self

    def unknown_to(self, recording: RecordingFacts) -> str | None:
        """Why a recording cannot tell what this policy would do; None where it can."""
        if not self.replayed:
            return f"policy {self.kind} asks for more than was recorded"
        # The longest draft of a request is also bounded by its room.
        longest = min(self.max_tokens, recording.max_new_tokens - 1)
        if longest > recording.max_draft:
            return f"up to {longest} candidates, at most {recording.max_draft} were recorded"
        return None


class HeadSettings(PolicySettings):
    """What policies with a trained head have in common."""

    head_kinds: ClassVar[tuple[str, ...]]  # that it can use

    head: str

    @property
    def heads(self) -> tuple[str, ...]:
        return (self.head,)

    @property
    def head_name(self) -> str:
        """The head's name without its folder."""
        return Path(self.head).name.removeprefix("bundled:")


AnyPolicy = Annotated[PolicySettings, OneOf(POLICIES)]
