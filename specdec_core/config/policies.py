"""What the settings of all length policies have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol, Self

from pydantic import Field

from specdec_core.base.errors import UserError
from specdec_core.config.kinds import POLICIES, KindSettings, OneOf
from specdec_core.config.recorded import RecordingFacts

MOST_TOKENS = 20  # SpecDec++'s bound
# What a candidate adds to a target forward is measured by a forward of n more tokens.
CANDIDATES = 4
PROFILE: Literal["profile"] = "profile"  # as a cost: measured

MaxTokens = Annotated[int, Field(ge=1, le=128, description="most candidate tokens in a round")]


class Costs(Protocol):
    """What a target forward costs, by the name of the draft model; None is the pair's first."""

    def target_cost(self, draft: str | None = None) -> float:
        """In calls of the draft model."""

    def target_in_candidates(self, draft: str | None = None) -> float:
        """In what a candidate takes: a call of the draft model, and a place in the target's
        forward."""


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
    def heads(self) -> tuple[str, ...]:
        """The names or folders of its trained heads."""
        return ()

    @property
    def remembers(self) -> bool:
        """Whether it learns from one request for later ones."""
        return False

    @property
    def decodes(self) -> bool:
        """Whether it can decode, that is, without knowing what the target will write."""
        return True

    @property
    def asks_cost(self) -> bool:
        """Whether it takes the cost of a target forward from a profile (:meth:`at_cost`)."""
        return False

    def cost_by(self, costs: Costs, draft: str | None) -> float:
        """The cost that it asks for, by what is known of the draft model's."""
        return costs.target_cost(draft)

    def at_cost(self, target_cost: float | Literal["profile"]) -> PolicySettings:
        """These settings where a target forward costs `target_cost`, in their own unit."""
        return self

    def unsupported_reason(self, recording: RecordingFacts) -> str | None:
        """Why a recording cannot tell what this policy would do; None where it can."""
        if not self.replayed:
            return f"policy {self.kind} asks for more than was recorded"
        return self.beyond_recorded(recording)

    def beyond_recorded(self, recording: RecordingFacts) -> str | None:
        """Why chains as long as it may ask for are not recorded; None where they are."""
        # The longest draft of a request is also bounded by its room.
        longest = min(self.max_tokens, recording.max_new_tokens - 1)
        if longest > recording.max_draft:
            return f"up to {longest} candidates, at most {recording.max_draft} were recorded"
        return None


_Cost = Annotated[float, Field(gt=0)] | Literal["profile"]
TargetCost = Annotated[
    _Cost, Field(description="a target forward in draft calls; profile: as measured")
]
CandidateCost = Annotated[
    _Cost,
    Field(
        description="a target forward in what a candidate takes, a draft call and a place in the"
        " target's forward; profile: as measured"
    ),
]


class PricedSettings(PolicySettings):
    """What policies that weigh drafting against a target forward have in common."""

    replayed: ClassVar = True

    if TYPE_CHECKING:

        @property
        def target_cost(self) -> float | Literal["profile"]: ...

    @property
    def asks_cost(self) -> bool:
        return self.target_cost == PROFILE

    def at_cost(self, target_cost: float | Literal["profile"]) -> Self:
        return self.model_copy(update={"target_cost": target_cost})

    @property
    def cost(self) -> float:
        """The target's cost as a number. Raises :class:`UserError` where it is still asked for."""
        if isinstance(self.target_cost, str):
            raise UserError("policy.target_cost: profile: there is no profile here; give a number")
        return self.target_cost

    def costing(self, words: str) -> str:
        """`words` with the cost, where it is known."""
        return "" if isinstance(self.target_cost, str) else words.format(self.target_cost)

    def unsupported_reason(self, recording: RecordingFacts) -> str | None:
        if self.asks_cost:
            return "what a target forward costs is not recorded: give a profile, or a target_cost"
        return super().unsupported_reason(recording)


class HeadSettings(PolicySettings):
    """What policies with a trained head have in common."""

    head_kinds: ClassVar[tuple[str, ...]]  # that it can use
    replayed: ClassVar = True

    head: str

    @property
    def heads(self) -> tuple[str, ...]:
        return (self.head,)


def head_name(head: str) -> str:
    """A trained head's name without its folder."""
    return Path(head).name.removeprefix("bundled:")


AnyPolicy = Annotated[PolicySettings, OneOf(POLICIES)]
