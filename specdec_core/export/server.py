"""What every server has: a version with known settings, and counterparts of our drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from specdec_core.base.errors import UserError
from specdec_core.config import (
    Configuration,
    DrafterSettings,
    PairConfiguration,
    PairSpec,
    RunnerSettings,
)
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.by_batch import ByBatchSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import Occurrence, PromptLookupSettings
from specdec_core.drafting.schedule.settings import ScheduleSettings

DraftKind = Literal["model", "eagle", "eagle3", "other"]


class DraftFile(NamedTuple):
    """A draft as another program finds it: its folder or hub id, and its kind. `eagle` is a head of
    EAGLE or EAGLE-2; the program does not read the kind `other`, and `refused` may give the reason.
    A `padded` model has the target's tokens, but a different number of logits."""

    place: str
    kind: DraftKind
    padded: bool = False
    refused: str | None = None


@dataclass(frozen=True)
class Models:
    """A pair's models as another program finds them; the first draft is the default."""

    target: str
    drafts: Mapping[str, DraftFile]

    def draft(self, name: str | None) -> DraftFile:
        """The draft of this name, or the first one. Raises :class:`UserError` where there is no
        such draft."""
        if name is None:
            name = next(iter(self.drafts), "")
        if name not in self.drafts:
            known = ", ".join(self.drafts) or "none"
            raise UserError(f"drafter.draft: the pair has no draft {name!r} (it has: {known})")
        return self.drafts[name]


@dataclass(frozen=True)
class Counterpart:
    """The settings of a server for a drafter, and remarks on how its behaviour differs from
    ours."""

    settings: Mapping[str, Any]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class WrittenFiles:
    """Files by their names, and the lines that use them from their folder."""

    files: Mapping[str, str]
    usage: str


class LoadRange(NamedTuple):
    """K candidates with `low` to `high` requests decoded together; without end for None."""

    low: int
    high: int | None
    tokens: int


@dataclass(frozen=True)
class LengthSettings:
    """A draft model's chain of a fixed length, or of one for each range of load."""

    draft: str | None
    spans: tuple[LoadRange, ...]

    @property
    def most(self) -> int:
        """The longest."""
        return max(span.tokens for span in self.spans)

    @property
    def scheduled(self) -> bool:
        return len(self.spans) > 1


PLUG_IN_FILE = "specdec.yaml"


def plug_in_file(
    configuration: Configuration, models: Models, runner: RunnerSettings
) -> dict[str, str]:
    """The file that plug-ins read, by its name; it names the models by where they are."""
    drafts = {name: d.place for name, d in configuration.drafts_of(models.drafts).items()}
    pair = PairSpec(target=models.target, drafts=drafts, runner=runner)
    return {PLUG_IN_FILE: PairConfiguration(pair=pair, configuration=configuration).to_yaml()}


class ExportTarget(ABC):
    """A program that decodes speculatively."""

    name: ClassVar[str]  # as --to takes it
    title: ClassVar[str]
    version: ClassVar[str]  # with these settings
    known: ClassVar[tuple[str, ...]]  # versions with the same settings
    files: ClassVar[tuple[str, ...]] = ()  # that may be written for it
    verified: ClassVar[bool] = False  # whether tests run the settings in the program itself
    heads: ClassVar[Literal["speculators", "specforge"] | None] = None  # format of EAGLE heads
    eagle: ClassVar[bool] = False  # whether it loads heads of the first generation, too
    occurrence: ClassVar[Occurrence] = "latest"  # of an n-gram, after which its lookups copy
    measures: ClassVar[bool] = False  # whether a plug-in there measures what a target forward costs

    @abstractmethod
    def counterpart(self, drafter: DrafterSettings | None, models: Models) -> Counterpart | None:
        """Its settings for a drafter; None if it has no counterpart."""

    @abstractmethod
    def written(self, counterpart: Counterpart, models: Models) -> WrittenFiles:
        """The counterpart as the program reads it."""

    def other_matches(self, drafter: PromptLookupSettings) -> tuple[str, ...]:
        """The remark where its lookups copy after another occurrence than ours."""
        if drafter.occurrence == self.occurrence:
            return ()
        return (
            f"copies after an n-gram's {self.occurrence} occurrence, not the {drafter.occurrence}",
        )

    def plugged_in(
        self, configuration: Configuration, models: Models, runner: RunnerSettings
    ) -> WrittenFiles:
        """The configuration for this library's plug-in in the program; `runner` says how its
        draft models run.

        Raises:
            UserError: there is no plug-in for the program, or it cannot draft by the configuration.
        """
        raise UserError(f"--plugin: there is none for {self.title}, but for vllm and transformers")


def fixed_chain(drafter: DrafterSettings | None) -> LengthSettings | None:
    """The chain that a drafter is: of a fixed length, by batch size, or a schedule of such with
    one draft. None for other drafters."""
    if isinstance(drafter, ScheduleSettings):
        return _scheduled(drafter)
    if type(drafter) is not DraftModelSettings:
        return None
    policy = drafter.policy
    if isinstance(policy, FixedSettings):
        return LengthSettings(drafter.draft, (LoadRange(1, None, policy.max_tokens),))
    if isinstance(policy, ByBatchSettings):
        return LengthSettings(drafter.draft, spans(policy.tokens))
    return None


def spans(tokens: Mapping[int, int]) -> tuple[LoadRange, ...]:
    """K by the least number of requests, as ranges; neighbours with the same K are one."""
    starts = [n for n, (least, k) in enumerate(tokens.items()) if not n or k != _before(tokens, n)]
    lows = list(tokens)
    ends = [*(lows[n] - 1 for n in starts[1:]), None]
    return tuple(
        LoadRange(lows[n], end, tokens[lows[n]]) for n, end in zip(starts, ends, strict=True)
    )


def _before(tokens: Mapping[int, int], number: int) -> int:
    return list(tokens.values())[number - 1]


def _scheduled(schedule: ScheduleSettings) -> LengthSettings | None:
    tokens: dict[int, int] = {}
    drafts = set()
    for least, drafter in schedule.ranges.items():
        chain = fixed_chain(drafter) if drafter is not None else None
        if drafter is not None and (chain is None or chain.scheduled):
            return None
        tokens[least] = chain.most if chain else 0
        drafts |= {chain.draft} if chain else set()
    return LengthSettings(drafts.pop(), spans(tokens)) if len(drafts) == 1 else None
