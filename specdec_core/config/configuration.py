"""One configuration, one value.

A :class:`Configuration` says how tokens are drafted and sampled. The same frozen value is a Tune
trial, an MLflow run, a registry entry, a Serve deployment and a line of a report. Unknown keys are
errors that name the key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import model_validator

from specdec_core.config.base import Value, identity
from specdec_core.config.drafters import AnyDrafter, DrafterSettings
from specdec_core.config.kinds import run_time
from specdec_core.config.pair import draft_named
from specdec_core.config.policies import PROFILE, Costs, PolicySettings, PricedSettings
from specdec_core.config.recorded import RecordingFacts
from specdec_core.config.sampling import Sampling

T = TypeVar("T")


class Configuration(Value):
    """How one request is decoded. Without a drafter this is autoregressive decoding."""

    drafter: AnyDrafter | None = None
    sampling: Sampling = Sampling()

    @model_validator(mode="before")
    @classmethod
    def _sample_as_the_arms(cls, value: Any) -> Any:
        """An arm of a bandit and a range of a schedule may be whole configurations; all must sample
        alike."""
        if not isinstance(value, dict):
            return value
        if "kind" in value and "drafter" not in value:
            kind = value["kind"]
            raise ValueError(f"put it under `drafter:`, as drafter: {{kind: {kind}}}")
        of_arms = [*_sampling_of_arms(value.get("drafter"))]
        if not of_arms:
            return value
        given = [value["sampling"]] if "sampling" in value else []
        distinct = {Sampling.model_validate(sampling) for sampling in [*given, *of_arms]}
        if len(distinct) > 1:
            shown = " and ".join(sorted(str(s.model_dump(exclude_defaults=True)) for s in distinct))
            raise ValueError(
                f"drafter.arms: arms with different sampling settings ({shown}); the arms of a"
                " bandit must sample alike"
            )
        return value if given else {**value, "sampling": of_arms[0]}

    @property
    def id(self) -> str:
        """Stable short id: the hash of the canonical JSON."""
        return identity(self)

    @property
    def label(self) -> str:
        """A short name for tables and plots; several may share one
        (:mod:`specdec_core.config.labels`)."""
        sampling = self.sampling.label
        return f"{self.without_sampling} ({sampling})" if sampling else self.without_sampling

    @property
    def without_sampling(self) -> str:
        """The label without the sampling, for tables in which all rows sample alike."""
        return self.drafter.label if self.drafter else "autoregressive"

    @property
    def sentence(self) -> str:
        """A plain description of everything that is not default."""
        drafted = self.drafter.sentence if self.drafter else "The target model decodes alone."
        sampling = self.sampling.sentence
        return f"{drafted} {sampling}." if sampling else drafted

    @property
    def family(self) -> str:
        """Configurations that differ only in their numbers share a family."""
        return self.drafter.family if self.drafter else "autoregressive"

    @property
    def parts(self) -> tuple[DrafterSettings, ...]:
        """The drafter and, depth first, all of its parts."""
        return tuple(self.drafter.walk()) if self.drafter else ()

    @property
    def drafts(self) -> tuple[str | None, ...]:
        """The names of its draft models; None is the pair's first."""
        return tuple(draft for part in self.parts for draft in part.drafts)

    @property
    def policies(self) -> tuple[tuple[str | None, PolicySettings], ...]:
        """Its length policies, each after the name of its draft model."""
        return tuple(policy for part in self.parts for policy in part.policies)

    @property
    def heads(self) -> tuple[tuple[str | None, str], ...]:
        """The names or folders of its trained heads, each after the name of its draft model."""
        return tuple((draft, head) for draft, policy in self.policies for head in policy.heads)

    @property
    def reads_hidden(self) -> bool:
        """Whether it reads the draft model's hidden states."""
        return bool(self.heads) or any(run_time(p).needs_hidden for _, p in self.policies)

    @property
    def unpriced(self) -> tuple[str | None, ...]:
        """The draft models with a length policy that asks what a target forward costs."""
        return tuple(dict.fromkeys(draft for draft, p in self.policies if p.asks_cost))

    def priced(self, costs: Costs) -> Configuration:
        """The configuration with the costs that its policies ask for."""
        if not self.unpriced:
            return self

        def at_cost(policy: PolicySettings, draft: str | None) -> PolicySettings:
            return policy.at_cost(policy.cost_by(costs, draft)) if policy.asks_cost else policy

        return self.model_copy(update={"drafter": _changed(self.drafter, None, at_cost)})

    @property
    def states(self) -> tuple[str, ...]:
        """The names or files of the saved states that it starts from."""
        return tuple(name for part in self.parts for name in part.states)

    @property
    def draft(self) -> str | None:
        """The first draft model that it names, or None."""
        return next((draft for draft in self.drafts if draft is not None), None)

    def draft_of(self, names: Iterable[str]) -> str | None:
        """The draft model that it runs of a pair with the drafts `names`, of several the first that
        it names; None if it runs none."""
        return (self.draft or next(iter(names), None)) if self.drafts else None

    def drafts_of(self, drafts: Mapping[str, T]) -> dict[str, T]:
        """The drafts of a pair that the configuration runs, in the order of `drafts`. A drafter
        that names no draft runs the first."""
        first = next(iter(drafts), None)
        used = {first if name is None else name for name in self.drafts}
        return {name: draft for name, draft in drafts.items() if name in used}

    def with_draft(self, name: str) -> Configuration:
        """The configuration with the draft model `name` wherever it names none."""
        return self.model_copy(update={"drafter": _with_draft(self.drafter, name)})

    def check_drafts(self, names: Collection[str], where: str) -> None:
        """Raises :class:`UserError`, naming `where`, for a draft model that it needs and a pair
        with the drafts `names` lacks."""
        for draft in self.drafts:
            draft_named(names, draft, where)

    @property
    def candidates(self) -> int:
        """The most that a round verifies."""
        return 0 if self.drafter is None else self.drafter.nodes

    @property
    def asynchronous(self) -> bool:
        """Whether it drafts on a separate device while the target verifies. Its counts then depend
        on time."""
        return any(part.asynchronous for part in self.parts)

    @property
    def lossless(self) -> bool:
        """Whether the output provably has the target's distribution."""
        return self.drafter is None or self.drafter.lossless

    @property
    def lossy_methods(self) -> frozenset[str]:
        """The kinds of its drafters that do not keep the target's distribution."""
        return frozenset(p.kind for p in self.parts if not p.parts and not p.lossless)

    def unsupported_reason(self, recording: RecordingFacts) -> str | None:
        """Why a recording cannot tell what decoding by it would do; None where it can."""
        if self.sampling != recording.sampling:
            return f"recorded with {recording.sampling.model_dump()}"
        if self.drafter is None:
            return None
        if self.drafter.parts and not all(policy.decodes for _, policy in self.policies):
            return "a policy that knows the target's text cannot be in a drafter made of drafters"
        return self.drafter.unsupported_reason(recording)

    def by(self, arm: int | None) -> Configuration:
        """The configuration of a round that a bandit's `arm` proposed for; None: itself."""
        return self.model_copy(update={"drafter": self.drafter and self.drafter.chosen(arm)})


def costless(drafter: Any) -> Any:
    """A drafter, or a configuration, in which policies ask for the cost of a target forward: it is
    the same on all machines."""

    def asking(policy: PolicySettings, _: str | None) -> PolicySettings:
        return policy.at_cost(PROFILE) if isinstance(policy, PricedSettings) else policy

    return _changed(drafter, None, asking)


def _changed(
    part: Any, draft: str | None, change: Callable[[PolicySettings, str | None], PolicySettings]
) -> Any:
    """A part of a drafter, of the draft model `draft`, with every policy changed."""
    if isinstance(part, PolicySettings):
        return change(part, draft)
    own = getattr(part, "draft", draft)
    return _rebuilt(part, lambda _, inner: _changed(inner, own, change))


def _with_draft(part: Any, name: str) -> Any:
    """A part of a drafter with the draft model `name` wherever none is named."""
    return _rebuilt(
        part,
        lambda field, inner: (
            name if field == "draft" and inner is None else _with_draft(inner, name)
        ),
    )


def _rebuilt(part: Any, change: Callable[[str, Any], Any]) -> Any:
    """A tuple, a mapping or a value with its members changed; the name of a value's field is the
    first argument of `change`."""
    if isinstance(part, tuple):
        return tuple(change("", each) for each in part)
    if isinstance(part, dict):
        return {key: change("", each) for key, each in part.items()}
    if not isinstance(part, Value):
        return part
    fields = {name: getattr(part, name) for name in type(part).model_fields}
    changes = {name: change(name, field) for name, field in fields.items()}
    return part.model_copy(update={n: new for n, new in changes.items() if new is not fields[n]})


def _sampling_of_arms(part: Any) -> Iterator[Any]:
    """The sampling of every arm, or range, of a drafter in a file that is a whole configuration."""
    if isinstance(part, list | tuple):
        for arm in part:
            yield from _sampling_of_arms(arm)
    elif isinstance(part, dict):
        if "sampling" in part and "kind" not in part:
            yield part["sampling"]
        yield from _sampling_of_arms(list(part.values()))


AUTOREGRESSIVE = Configuration()
