"""What the settings of all drafters have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specdec_core.config.kinds import DRAFTERS, POLICIES, KindSettings, OneOf
from specdec_core.config.policies import AnyPolicy, PolicySettings
from specdec_core.config.recorded import RecordingFacts

MOST_NODES = 128  # of a token tree; the slots' caches have room for as many candidates

Width = Annotated[int, Field(ge=1, le=MOST_NODES)]
Branching = Annotated[tuple[Width, ...], Field(min_length=1)]
Draft = Annotated[str | None, Field(description="a draft of the pair; unset, the first")]
Memory = Annotated[
    Literal["request", "all"],
    Field(description="what is learned serves the request alone, or all that follow"),
]


class DrafterSettings(KindSettings):
    """What all drafters have in common.

    The settings of a lookup are :class:`LookupSettings`. Those that PEARL can draft asynchronously
    are :class:`ChainSettings`.
    """

    role: ClassVar[str] = "Drafter"
    may_be_lossy: ClassVar[bool] = False  # whether some of its settings change the output
    target_started: ClassVar[bool] = False  # whether the target draws the first tokens of its trees

    def model_post_init(self, _: Any) -> None:
        if begun := [part.kind for part in self.parts if part.target_started]:
            raise ValueError(
                f"{self.kind}: a {begun[0]} begins with the target's tokens; it cannot be a part of"
                " another drafter"
            )
        if self.nodes > MOST_NODES:
            raise ValueError(
                f"{self.kind}: a tree of {self.nodes} nodes, at most {MOST_NODES} are possible"
            )

    @property
    def sentence(self) -> str:
        lossy = "" if self.lossless else " The output does not keep the target's distribution."
        return super().sentence + lossy

    @property
    def name(self) -> str:
        """Its name as a part of another drafter: the label up to the first comma."""
        return self.label.partition(",")[0]

    @property
    @abstractmethod
    def depth(self) -> int:
        """The most consecutive candidate tokens of a round, which adds at most one more token."""

    @abstractmethod
    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        """Why a recording cannot tell what this drafter would do; None where it can. With `whole`
        the rejected candidates must be known, too, because another drafter uses them."""

    @property
    def nodes(self) -> int:
        """The most candidate tokens of a round."""
        return self.depth

    @property
    def chain(self) -> bool:
        """Whether every round's tree is a chain."""
        return self.nodes <= self.depth

    @property
    def reads_rejected(self) -> bool:
        """Whether it learns from the target's tokens after candidates that it rejects."""
        return any(part.reads_rejected for part in self.parts)

    @property
    def remembers(self) -> bool:
        """Whether what earlier requests wrote decides what it proposes to later ones."""
        learned = any(policy.remembers for _, policy in self.policies)
        return learned or any(part.remembers for part in self.parts)

    @property
    def family(self) -> str:
        """Drafters that differ only in their numbers share a family."""
        return self.kind

    @property
    def lossless(self) -> bool:
        """Whether the output provably keeps the target's distribution."""
        return all(part.lossless for part in self.parts)

    @property
    def parts(self) -> tuple[DrafterSettings, ...]:
        """The drafters that this one is made of."""
        return ()

    def walk(self) -> Iterator[DrafterSettings]:
        """This drafter and, depth first, all of its parts."""
        yield self
        for part in self.parts:
            yield from part.walk()

    # Without its parts:

    @property
    def drafts(self) -> tuple[str | None, ...]:
        """The name of its draft model; None is the pair's first."""
        return ()

    @property
    def policies(self) -> tuple[tuple[str | None, PolicySettings], ...]:
        """The length policy of its draft model, after that model's name."""
        return ()

    @property
    def states(self) -> tuple[str, ...]:
        """The saved state that it starts from."""
        return ()

    @property
    def keeps_state(self) -> bool:
        """Whether it keeps a state from request to request."""
        return False

    @property
    def asynchronous(self) -> bool:
        """Whether it drafts on a separate device while the target verifies."""
        return False

    def chosen(self, arm: int | None) -> DrafterSettings:
        """The drafter of a round that a bandit's `arm` proposed for; None: itself."""
        return self

    def unknown_part(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        """Why a recording cannot tell what one of its parts would do; None where it can."""
        reasons = (part.unsupported_reason(recording, whole) for part in self.parts)
        return next((reason for reason in reasons if reason), None)


class ModelSettings(DrafterSettings):
    """What drafters with a draft model have in common."""

    draft: Draft = None

    @property
    def drafts(self) -> tuple[str | None, ...]:
        return (self.draft,)

    @property
    def draft_name(self) -> str:
        """The draft model in a label."""
        return self.draft or "draft"

    def unknown_draft(self, recording: RecordingFacts) -> str | None:
        """Why a recording lacks the draft model; None where it has it."""
        if recording.drafts and self.draft in (None, *recording.drafts):
            return None
        wanted = "a draft" if self.draft is None else f"draft {self.draft!r}"
        return f"it needs {wanted}, recorded were: {', '.join(recording.drafts) or 'none'}"

    def unknown_tree(self, recording: RecordingFacts, whole: bool) -> str | None:
        """Why a recording cannot tell how far a tree of the draft model's most likely tokens is
        accepted, or all of its tokens; None where it can."""
        if not recording.sampling.greedy:
            return "how far a tree is accepted is recorded for greedy decoding only"
        if whole:
            return "of a tree only those tokens are recorded that the target accepts"
        if self.is_eagle(recording):
            return "of a head chains are recorded, not trees"
        return self.unknown_draft(recording)

    def is_eagle(self, recording: RecordingFacts) -> bool:
        """Whether the draft is an EAGLE head."""
        first = next(iter(recording.drafts), None)
        return (self.draft or first) in recording.eagle_heads


class PolicyDrafterSettings(ModelSettings):
    """What drafters with a draft model and a length policy have in common."""

    policy: AnyPolicy

    @property
    def depth(self) -> int:
        return self.policy.max_tokens

    @property
    def policies(self) -> tuple[tuple[str | None, PolicySettings], ...]:
        return ((self.draft, self.policy),)

    def unknown_chain(self, recording: RecordingFacts) -> str | None:
        """Why a recording cannot tell the draft model's chain; None where it can."""
        unknown = self.unknown_draft(recording) or self.policy.unsupported_reason(recording)
        if unknown is None and self.is_eagle(recording):
            if self.parts:
                return "what a head would draft after guesses is not recorded"
            return self.policy.beyond_recorded(recording)  # its agreeing drafts are no exception
        return unknown


class LookupSettings(DrafterSettings):
    """What drafters that look sequences up, without a model, have in common."""

    @property
    def longest_match(self) -> int | None:
        """The most of the sequence's last tokens that it looks for; None without a limit."""
        return None

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        return None


class ChainSettings(PolicyDrafterSettings):
    """What drafters of a draft model's chain have in common; PEARL can draft these
    asynchronously."""

    @property
    def guesses(self) -> LookupSettings | None:
        """The lookup that guesses the chain's next tokens, if any."""
        return None

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        return self.unknown_chain(recording) or self.unknown_part(recording)


class ArmsSettings(DrafterSettings):
    """What drafters have in common that choose among drafters, their `parts`, in every round."""

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        # The engine has one link to an asynchronous draft, which drafts in one way.
        if sum(part.asynchronous for part in self.walk()) > 1:
            raise ValueError(f"{self.kind}: has more than one pearl; a configuration can have one")

    @property
    def depth(self) -> int:
        return max(part.depth for part in self.parts)

    @property
    def nodes(self) -> int:
        return max(part.nodes for part in self.parts)

    @property
    def chain(self) -> bool:
        return all(part.chain for part in self.parts)

    def chosen(self, arm: int | None) -> DrafterSettings:
        return self if arm is None else self.parts[arm]

    def unsupported_reason(self, recording: RecordingFacts, whole: bool = False) -> str | None:
        return self.unknown_part(recording, whole)


AnyDrafter = Annotated[DrafterSettings, OneOf(DRAFTERS)]
AnyLookup = Annotated[LookupSettings, OneOf(DRAFTERS)]
AnyChain = Annotated[ChainSettings, OneOf(DRAFTERS)]


def read_arm(value: Any) -> Any:
    """An arm in a file as the drafter that it stands for: a drafter, a policy (of the first draft
    model), a whole number K, or a whole configuration. Raises :class:`ValueError` for a key that
    no configuration has."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"kind": "fixed", "max_tokens": value}
    if isinstance(value, dict) and "kind" not in value and "drafter" in value:
        if unknown := [key for key in value if key not in ("drafter", "sampling")]:
            raise ValueError(f"{unknown[0]}: unknown key of an arm; there are drafter, sampling")
        return value["drafter"]
    if isinstance(value, dict) and isinstance(value.get("kind"), str) and value["kind"] in POLICIES:
        return {"kind": "draft_model", "policy": value}
    return value
