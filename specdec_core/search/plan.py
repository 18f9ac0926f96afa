"""A sweep's plan: a YAML file, resolved and checked before anything starts.

A :class:`Plan` is what a user writes, with open values, unnamed drafts and patterns for heads.
:meth:`Plan.resolve` fills them in once; everything after it works on the :class:`ResolvedPlan`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator

from specdec_core.base.errors import UserError
from specdec_core.base.workspace import as_first_placed
from specdec_core.config import (
    Configuration,
    DrafterSettings,
    HeadSettings,
    ModelSettings,
    PairSpec,
    Placement,
    Sampling,
    Value,
    load_yaml,
    overridden,
    parse,
)
from specdec_core.config.drafters import read_arm
from specdec_core.config.kinds import DRAFTERS, POLICIES, kinds_of
from specdec_core.cost import Profile
from specdec_core.cost.profile import check_rows
from specdec_core.prompts.source import PromptSource
from specdec_core.search.load.trace import read_trace
from specdec_core.search.load.workload import LiveSettings, Workload
from specdec_core.search.space import Search

EVERY = "*"  # in the name of a head: all trained heads with matching names, as in a shell


class MeasuredForwards(Value):
    """The forwards to measure before finalists are timed; what is unset is chosen by the pair and
    the search."""

    widths: tuple[PositiveInt, ...] | None = Field(
        default=None, description="tokens of a row that a forward feeds"
    )
    contexts: tuple[PositiveInt, ...] | None = Field(
        default=None, description="tokens of a row that are in the cache"
    )
    batches: tuple[PositiveInt, ...] | None = Field(default=None, description="rows")
    repeats: PositiveInt | None = Field(default=None, description="times each is measured")


class RaceSettings(Value):
    """How long finalists are timed."""

    within: float = Field(
        default=0.01, gt=0, description="stop when the choice costs at most this share of the time"
    )
    seconds: float = Field(
        default=120, ge=0, description="stop this many seconds after each prompt's first run"
    )
    further: NonNegativeInt = Field(
        default=64, description="prompts of the source, beyond the limit, that may be timed too"
    )
    challengers: NonNegativeInt = Field(
        default=4, description="configurations timed because the first times make them promising"
    )


class SweepSettings(Value):
    """The settings of a sweep, without its search."""

    pair: PairSpec = PairSpec()
    prompts: PromptSource = PromptSource()
    max_new_tokens: PositiveInt = 64
    sampling: Sampling = Sampling()
    method: Literal["grid", "random", "optuna"] = "grid"
    trials: PositiveInt | None = Field(
        default=None, description="configurations to try; unset, the whole grid"
    )
    seed: NonNegativeInt = 0
    early_stopping: bool = Field(
        default=False, description="stop configurations that fall behind on the first prompts"
    )
    allow_lossy: tuple[str, ...] = Field(
        default=(), description="methods that change the output, yet may be the champion"
    )
    finalists: PositiveInt = Field(default=4, description="configurations timed alone")
    repeats: PositiveInt = Field(
        default=3, description="times a finalist runs each prompt, at most"
    )
    race: RaceSettings = RaceSettings()
    forwards: MeasuredForwards = MeasuredForwards()
    profile: Profile | None = Field(
        default=None,
        description="forward times of another machine, for which the sweep ranks without timing, or"
        " of the server that is swept; a file or inline",
    )
    traces: str | None = Field(
        default=None, description="recording to replay; unset, the workspace's, if it has one"
    )
    replay: bool = Field(default=True, description="count by replay what a recording knows")
    cluster: Placement | None = Field(
        default=None, description="devices of the models; a file or inline"
    )
    workload: Workload | None = Field(
        default=None,
        description="requests at once; for each load of it a configuration is chosen",
    )
    live: LiveSettings = LiveSettings()

    @field_validator("allow_lossy")
    @classmethod
    def _can_be_lossy(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        kinds = kinds_of(DRAFTERS, DrafterSettings)
        known = [name for name, kind in kinds.items() if kind.may_be_lossy]
        for method in methods:
            if method not in known:
                raise ValueError(f"no lossy method {method!r} (there are: {', '.join(known)})")
        return methods

    @field_validator("cluster", mode="before")
    @classmethod
    def _read_cluster(cls, value: Any) -> Any:
        return Placement.load(value) if isinstance(value, str | Path) else value

    @field_validator("profile", mode="before")
    @classmethod
    def _read_profile(cls, value: Any) -> Any:
        return Profile.load(value) if isinstance(value, str | Path) else value

    @property
    def autoregressive(self) -> Configuration:
        """The baseline of every speedup."""
        return Configuration(sampling=self.sampling)


class ResolvedPlan(SweepSettings):
    """A sweep with nothing left open.

    A grid or a random search has `configurations`; Optuna has None and draws from `space`.
    `samples` are the same configurations, or the ends of every range of `space`: the sweep needs no
    more drafts and heads than they do. `given`, the plan that the user wrote, `entries`
    and the prompts identify the sweep.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    configurations: tuple[Configuration, ...] | None
    space: Search
    samples: tuple[Configuration, ...]
    given: dict[str, Any]
    entries: tuple[dict[str, Any], ...]

    @property
    def drafts_apart(self) -> bool:
        """Whether a configuration drafts while the target verifies."""
        return any(configuration.asynchronous for configuration in self.samples)

    def priced(self, profile: Profile) -> ResolvedPlan:
        """The plan with what its configurations ask about costs taken from `profile`; those that
        Optuna draws are priced as they are drawn."""
        if self.configurations is None:
            return self
        priced = tuple(each.priced(profile) for each in self.configurations)
        return self.model_copy(update={"configurations": priced, "samples": priced})

    def digest(self, prompts_digest: str) -> str:
        """A hash of everything that the results depend on."""
        # Replayed counts equal live counts, so a sweep may resume either way.
        settings = {k: v for k, v in self.given.items() if k not in ("traces", "replay")}
        content: list[Any] = [settings, self.entries, prompts_digest]
        if self.workload is not None and self.workload.trace is not None:
            content.append(hashlib.sha256(Path(self.workload.trace).read_bytes()).hexdigest())
        canonical = as_first_placed(json.dumps(content, sort_keys=True))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def check(self, source: str) -> None:
        """Raises :class:`UserError`, naming `source` and the key, for a configuration that this
        sweep cannot try."""
        if self.workload is not None and self.workload.trace is not None:
            read_trace(self.workload.trace)
        if self.workload is not None and self.workload.slots > 1:
            if self.profile is None:
                check_rows(self.forwards.batches or (), f"{source}: forwards: batches")
            else:
                check_rows(self.profile.rows, f"{source}: profile: target")
        for configuration in self.samples:
            if configuration.sampling != self.sampling:
                raise UserError(
                    f"{source}: search: sampling {configuration.sampling.model_dump()} is not the "
                    "sweep's own; a sweep compares configurations of one sampling, given at the top"
                )
            configuration.check_drafts(self.pair.drafts, f"{source}: search: drafter.draft")
        if self.drafts_apart and (self.cluster is None or not self.cluster.draft.devices):
            raise UserError(
                f"{source}: search: pearl drafts on a device of its own: say which, with --cluster"
                " and a placement that has one for the draft"
            )
        if self.drafts_apart and self.profile is not None:
            raise UserError(
                f"{source}: search: what pearl does depends on time, so it is measured on its"
                " devices: no other machine's profile"
            )
        # Timed, they would be beaten by autoregressive decoding.
        lossy = [c.lossy_methods - set(self.allow_lossy) for c in self.samples]
        if self.profile is not None and all(lossy):
            names = ", ".join(sorted(frozenset[str]().union(*lossy)))
            raise UserError(
                f"{source}: search: only lossy methods, of which none may be the best unless "
                f"it is allowed by name (allow_lossy: [{names}])"
            )


class Plan(SweepSettings):
    """A sweep as the user writes it.

    `search` lists configurations with open values (:mod:`specdec_core.search.space`). An entry with
    a draft model that names no draft is tried with each of the pair's. An entry with a pattern for
    its head ("*", "bundled:*") is tried with each of the draft's trained heads that match."""

    search: tuple[dict[str, Any], ...]

    @property
    def empty(self) -> bool:
        """Whether nothing is left to try: every entry needs a draft, and the pair has none."""
        return not self._entries()

    def resolve(self, source: str = "sweep") -> ResolvedPlan:
        """The plan with its search expanded and every configuration validated; for Optuna, those at
        the ends of every range. Raises :class:`UserError`, naming `source` and the key."""
        if self.method != "grid" and self.trials is None:
            raise UserError(f"{source}: trials: method {self.method} needs a number of trials")
        entries = self._entries()
        if self.search and not entries and any(map(_has_head_pattern, self.search)):
            raise UserError(
                f"{source}: search: no head of this pair was trained; `specdec train head` does"
            )
        space = Search.of(entries, source)
        configurations = self._configurations(space)
        settings = {name: getattr(self, name) for name in SweepSettings.model_fields}
        resolved = ResolvedPlan(
            **settings,
            configurations=None if configurations is None else tuple(configurations),
            space=space,
            samples=tuple(space.extremes() if configurations is None else configurations),
            given=self.model_dump(mode="json"),
            entries=tuple(entries),
        )
        resolved.check(source)
        return resolved

    def _configurations(self, space: Search) -> list[Configuration] | None:
        """The configurations to try; None for Optuna. Of a grid larger than `trials`, a random
        part."""
        if self.method == "optuna":
            return None
        if self.method == "random":
            return space.draw(self.trials or 1, self.seed)
        grid = space.grid()
        if self.trials is None or self.trials >= len(grid):
            return grid
        chosen = random.Random(self.seed).sample(range(len(grid)), self.trials)
        return [grid[i] for i in sorted(chosen)]

    def _entries(self) -> list[dict[str, Any]]:
        """`search` with the plan's sampling, and with drafts and heads filled in. Entries for which
        there is no draft or no head are left out."""
        shared = {"sampling": self.sampling.model_dump()}
        return [{**shared, **full} for entry in self.search for full in self._completed(entry)]

    def _completed(self, entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
        drafter = entry.get("drafter")
        if not isinstance(drafter, dict) or not _runs_draft(drafter):
            # The parts of a drafter that name no draft all take the same one.
            if _with_draft(drafter, None) == drafter:
                yield entry
            else:
                for draft in self.pair.drafts:
                    yield {**entry, "drafter": _with_draft(drafter, draft)}
            return
        if "draft" not in drafter and not self.pair.drafts:
            return
        drafter = {"draft": list(self.pair.drafts), **drafter}
        if not _has_head_pattern(entry):
            yield {**entry, "drafter": drafter}
            return
        drafts = drafter["draft"]
        if isinstance(drafts, dict):
            drafts = drafts.get("choice", [])
        for draft in drafts if isinstance(drafts, list) else [drafts]:
            policy = drafter["policy"]
            if heads := _matching(self._heads(draft, _heads_for(policy)), policy["head"]):
                policy = {**policy, "head": heads}
                yield {**entry, "drafter": {**drafter, "draft": draft, "policy": policy}}

    def _heads(self, draft: str, kinds: tuple[str, ...]) -> list[str]:
        """The trained heads for a draft of the pair; none where the models are not on disk."""
        # Importing torch takes seconds.
        from specdec_core.drafting.heads.storage import find_heads
        from specdec_core.models.fingerprints import fingerprint

        if draft not in self.pair.drafts:
            return []
        try:
            prints = fingerprint(self.pair.drafts[draft]), fingerprint(self.pair.target)
        except UserError:
            return []
        return find_heads(kinds, *prints, self.sampling)


def _with_draft(value: Any, draft: str | None) -> Any:
    """A drafter of a search in which every part that names no draft takes `draft`, those that it
    leaves out included."""
    if isinstance(value, list):
        return [_with_draft(member, draft) for member in value]
    if not isinstance(value, dict):
        return value
    if isinstance(arms := value.get("arms"), list):
        value = {**value, "arms": [_read(arm) for arm in arms]}
    if isinstance(ranges := value.get("ranges"), dict):
        value = {**value, "ranges": {least: _read(arm) for least, arm in ranges.items()}}
    value = {key: _with_draft(inner, draft) for key, inner in value.items()}
    if settings := kinds_of(DRAFTERS, DrafterSettings).get(_kind(value)):
        for name, field in settings.model_fields.items():
            if name not in value and isinstance(part := field.default, ModelSettings):
                value[name] = part.model_copy(update={"draft": draft}).model_dump(mode="json")
    if _runs_draft(value) and "draft" not in value:
        value["draft"] = draft
    return value


def _read(arm: Any) -> Any:
    """An arm as a drafter; a whole configuration is kept, for the sampling that it names."""
    return arm if isinstance(arm, dict) and "drafter" in arm else read_arm(arm)


def _has_head_pattern(entry: Any) -> bool:
    """Whether an entry of a search names its heads by a pattern."""
    drafter = entry.get("drafter") if isinstance(entry, dict) else None
    policy = drafter.get("policy") if isinstance(drafter, dict) else None
    return (
        isinstance(policy, dict)
        and bool(_heads_for(policy))
        and EVERY in str(policy.get("head", ""))
    )


def _matching(known: list[str], wanted: Any) -> list[Any]:
    """The `known` heads that patterns match, and those that are given by their names."""
    if isinstance(wanted, dict):
        wanted = wanted.get("choice", [])
    found: dict[Any, None] = {}
    for name in wanted if isinstance(wanted, list) else [wanted]:
        found |= dict.fromkeys(fnmatch.filter(known, name) if EVERY in str(name) else [name])
    return list(found)


def _runs_draft(drafter: Mapping[str, Any]) -> bool:
    """Whether a drafter in a search has a draft model."""
    return _kind(drafter) in kinds_of(DRAFTERS, ModelSettings)


def _heads_for(policy: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of trained heads that a policy in a search can use."""
    settings = kinds_of(POLICIES, HeadSettings).get(_kind(policy))
    return settings.head_kinds if settings else ()


def _kind(part: Mapping[str, Any]) -> str:
    """The kind of a drafter or a policy in a search; "" without one, and for several, which
    :class:`Search` refuses."""
    kind = part.get("kind", "")
    return kind if isinstance(kind, str) else ""


def read_plan(path: str | Path, **overrides: Any) -> Plan:
    """Read a sweep file, but do not resolve its search; `overrides` replace its top-level values
    (:func:`specdec_core.config.overridden`).

    Raises :class:`UserError` for anything wrong in it except in its search."""
    content = load_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a mapping with a search in it")
    if "configuration" in content and "search" not in content:
        raise UserError(
            f"{path}: one configuration, as `specdec serve --config` takes it; a sweep file has"
            " `search:`, a list of such configurations"
        )
    return parse(Plan, overridden(content, overrides), str(path))


def load_plan(path: str | Path, **overrides: Any) -> ResolvedPlan:
    """Read a sweep file as :func:`read_plan` does, and resolve it.

    Raises :class:`UserError` for anything wrong in it, every configuration included."""
    return read_plan(path, **overrides).resolve(str(path))
