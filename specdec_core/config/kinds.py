"""The table of kinds: the modules with the settings and the run time of every drafter and policy.

The module of a kind has two classes, `SvipSettings` and `SvipPolicy`, or `SuffixSettings` and
`SuffixDrafter`: what a configuration says, and what decodes by it. Settings load without torch, so
a kind that needs torch is a package with the modules `settings` and `drafter` (or `policy`). Kinds
that share their code share a module or package. It is imported when one of its kinds is first used.

Users add their own kinds with :func:`add_policy` and :func:`add_drafter`. The modules that the
environment variable SPECDEC_KINDS names are imported in every process before the first kind is
looked up, and may do so.
"""

from __future__ import annotations

import os
import re
import sys
from abc import abstractmethod
from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from inspect import getdoc
from typing import Any, ClassVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from specdec_core.base.errors import UserError
from specdec_core.config.base import Value, identity

DRAFTERS = {
    "draft_model": "specdec_core.drafting.draft_model",
    "tree": "specdec_core.drafting.tree",
    "fork": "specdec_core.drafting.tree",
    "target_tree": "specdec_core.drafting.target_started",
    "target_fork": "specdec_core.drafting.target_started",
    "dynamic_tree": "specdec_core.drafting.dynamic_tree",
    "prompt_lookup": "specdec_core.drafting.prompt_lookup",
    "suffix": "specdec_core.drafting.suffix",
    "token_cache": "specdec_core.drafting.token_cache",
    "cascade": "specdec_core.drafting.draft_model",
    "post_use": "specdec_core.drafting.post_use",
    "hybrid": "specdec_core.drafting.hybrid",
    "bandit": "specdec_core.drafting.bandit",
    "schedule": "specdec_core.drafting.schedule",
    "pearl": "specdec_core.drafting.pearl",
}
POLICIES = {
    "fixed": "specdec_core.drafting.policies.fixed",
    "heuristic": "specdec_core.drafting.policies.heuristic",
    "confidence": "specdec_core.drafting.policies.confidence",
    "svip": "specdec_core.drafting.policies.confidence",
    "confidence_product": "specdec_core.drafting.policies.confidence",
    "break_even": "specdec_core.drafting.policies.break_even",
    "pre_cut": "specdec_core.drafting.policies.pre_cut",
    "specdecpp": "specdec_core.drafting.policies.heads",
    "decision": "specdec_core.drafting.policies.heads",
    "oracle": "specdec_core.drafting.policies.oracle",
}
OWN_KINDS = "SPECDEC_KINDS"
_NOUNS = {"Drafter": "drafter", "Policy": "length policy"}  # by role


class KindSettings(Value):
    """The settings of a kind. Every kind defines what is abstract here and below, and class
    variables without a value."""

    role: ClassVar[str]  # "Drafter" or "Policy": how the name of the run-time class ends
    kind: str

    @property
    @abstractmethod
    def label(self) -> str:
        """A short name for tables and plots: what proposes, then after a comma what distinguishes
        it within its kind. Several may share one (:mod:`specdec_core.config.labels`)."""

    @property
    def sentence(self) -> str:
        """A plain description: the first sentence of the class's documentation, the numbers, what
        else is not default, and the same of its parts."""
        told, parts = [], []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, KindSettings):
                parts.append(value.sentence)
            elif value != field.default or not isinstance(value, bool | str | None):
                told.append(f"{name.replace('_', ' ')} {_spoken(value)}")
        summary = " ".join((getdoc(type(self)) or "").replace("`", "").split())
        first = re.split(r"(?<=\.) (?=[A-Z])", summary)[0].removesuffix(".")
        return " ".join([f"{first}: {', '.join(told)}." if told else f"{first}.", *parts])


def _spoken(value: Any) -> str:
    """A value in a sentence."""
    if value is None:
        return "nothing"
    if isinstance(value, KindSettings):
        return value.label
    if isinstance(value, Mapping):
        told = zip(value, _told_apart(value.values()), strict=True)
        return "; ".join(f"from {key} on {each}" for key, each in told)
    if isinstance(value, tuple):
        return "; ".join(_told_apart(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _told_apart(values: Collection[Any]) -> list[str]:
    """Values in a sentence; the same label twice gets the beginning of each one's id."""
    labels = [_spoken(each) for each in values]
    return [
        f"{label} {identity(each)[:4]}"
        if isinstance(each, Value) and labels.count(label) > 1
        else label
        for label, each in zip(labels, values, strict=True)
    ]


def add_drafter(kind: str, place: str) -> None:
    """Add a kind of drafter, with its settings and run time in the module or package `place`.

    Raises:
        TypeError: `place` lacks something that a kind must have.
        ValueError: there is another kind of that name.
    """
    _add(DRAFTERS, kind, place)


def add_policy(kind: str, place: str) -> None:
    """Add a kind of length policy; see :func:`add_drafter`."""
    _add(POLICIES, kind, place)


def kinds_of(table: Mapping[str, str], base: type) -> dict[str, Any]:
    """The settings classes of all kinds in `table` that are of the type `base`."""
    _import_user_kinds()
    every = {kind: _settings(place, kind) for kind, place in table.items()}
    return {kind: settings for kind, settings in every.items() if issubclass(settings, base)}


def run_time(settings: KindSettings | type[KindSettings]) -> Any:
    """The class that decodes by `settings`: `SuffixDrafter` for `SuffixSettings`."""
    kind = settings if isinstance(settings, type) else type(settings)
    module = kind.__module__
    if module.endswith(".settings"):
        module = module.removesuffix("settings") + kind.role.lower()
    name = kind.__name__.removesuffix("Settings") + kind.role
    try:
        return getattr(import_module(module), name)
    except AttributeError:
        raise TypeError(f"{module}: no class {name} to decode by {kind.__name__}") from None


class OneOf:
    """Annotates a field: any kind in `table` with settings of the field's type.

    The table is read when a value is validated or a JSON schema is made, not when the field is
    defined. So settings can hold each other, nothing is imported before it is needed, and a kind
    that was added is known everywhere at once.
    """

    def __init__(self, table: Mapping[str, str]) -> None:
        self.table = table
        self._described: set[str] = set()  # types with a JSON schema in progress

    def __get_pydantic_core_schema__(self, base: Any, _: GetCoreSchemaHandler) -> CoreSchema:
        def validate(value: Any) -> Any:
            if isinstance(value, base):
                return value
            # The kind is looked up here and not by a union of pydantic's, which would put it into
            # the paths of errors as if it were a key.
            return self._asked(value, base).model_validate(value)

        return core_schema.no_info_plain_validator_function(validate, metadata={"base": base})

    def model_of(self, value: Any) -> Any:
        """The settings class that `value` names; None where it names none."""
        kind = value.get("kind") if isinstance(value, Mapping) else None
        known = kinds_of(self.table, KindSettings)
        return known.get(kind) if isinstance(kind, str) else None

    def _asked(self, value: Any, base: Any) -> Any:
        """:meth:`model_of`. Raises ValueError where it is none of the type `base`."""
        known = kinds_of(self.table, base)
        there_are = f"there are {', '.join(known)}"
        if not isinstance(value, Mapping):
            raise ValueError(f"expected {{kind: …}}; {there_are}")
        if "kind" not in value:
            raise ValueError(f"its kind is missing; {there_are}")
        kind, noun = value["kind"], _NOUNS[base.role]
        if isinstance(kind, str) and kind in known:
            return known[kind]
        if isinstance(kind, str) and kind in self.table:
            raise ValueError(f"{noun} {kind!r} cannot be used here; {there_are}")
        problem = f"no {noun} {kind!r}"
        if isinstance(kind, str) and self.table is DRAFTERS and kind in POLICIES:
            problem += f", it is a length policy: put it as policy: {{kind: {kind}}} into a drafter"
        elif isinstance(kind, str) and self.table is POLICIES and kind in DRAFTERS:
            problem += ", it is a drafter"
        raise ValueError(f"{problem}; {there_are}")

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        base = schema["metadata"]["base"]
        name = base.__name__
        if name in self._described:
            return handler(core_schema.definition_reference_schema(name))
        self._described.add(name)
        try:
            choices = {
                kind: TypeAdapter(settings).core_schema
                for kind, settings in kinds_of(self.table, base).items()
            }
            union = core_schema.tagged_union_schema(choices, "kind", ref=name)
            return handler(core_schema.definitions_schema(union, []))
        finally:
            self._described.discard(name)


@cache
def _settings(place: str, kind: str) -> type[KindSettings]:
    """The settings class in `place`; raises TypeError where it is missing or incomplete."""
    module = import_module(place)
    if hasattr(module, "__path__"):
        module = import_module(f"{place}.settings")
    for settings in vars(module).values():
        if (
            isinstance(settings, type)
            and issubclass(settings, KindSettings)
            and "kind" in settings.model_fields
            and settings.model_fields["kind"].default == kind
        ):
            unset = {name for name in settings.__class_vars__ if not hasattr(settings, name)}
            if missing := ", ".join(sorted(settings.__abstractmethods__ | unset)):
                raise TypeError(
                    f"{settings.__module__}: {settings.__name__} does not say its {missing}"
                )
            return settings
    raise TypeError(
        f"{module.__name__}: no settings with kind: Literal[{kind!r}] = {kind!r} for kind {kind}"
    )


def _add(table: dict[str, str], kind: str, place: str) -> None:
    if table.get(kind, place) != place:
        raise ValueError(f"kind {kind} is {table[kind]}, it cannot be {place} as well")
    run_time(_settings(place, kind))
    table[kind] = place


@cache
def _import_user_kinds() -> None:
    """Import the modules that SPECDEC_KINDS names, once a process."""
    for name in os.environ.get(OWN_KINDS, "").replace(",", " ").split():
        if name in sys.modules:
            continue
        try:
            import_module(name)
        except ImportError as error:
            raise UserError(f"{OWN_KINDS}: {name}: {error}") from None
