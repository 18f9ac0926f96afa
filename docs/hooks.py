"""The manual's pages that are generated from the code: every configuration key, every command."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).parents[1]
MOST_NAMED = 5  # kinds in a cell; of more there is a link
sys.path.insert(0, str(ROOT))

import typer  # noqa: E402
import yaml  # noqa: E402
from mkdocs.structure.pages import Page  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from pydantic.fields import FieldInfo  # noqa: E402
from pydantic_core import PydanticUndefined  # noqa: E402


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fill `<!-- … -->` marks of the reference pages."""
    for mark, make in {"<!-- commands -->": commands, "<!-- configuration -->": keys}.items():
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Drop the roles, as in ``:class:`Engine```, of docstrings."""
    return re.sub(r":(?:class|mod|func|meth|attr):(?=<code>)", "", html)


# Commands


def commands() -> str:
    """A section for each command: its purpose and its options, as the program says them."""
    from jobs.cli import COMMANDS, command

    return "\n".join(_command(name, typer.main.get_command(command(name))) for name in COMMANDS)


def _command(name: str, program: Any) -> str:
    lines = [f"## specdec {name}", "", " ".join((program.help or "").split()), ""]
    rows = [row for parameter in program.params for row in _option(parameter)]
    if rows:
        lines += ["| option | value | | default |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _option(parameter: Any) -> Iterator[str]:
    if parameter.name == "help":
        return
    name = parameter.name.upper()
    if parameter.param_type_name == "option":
        name = " / ".join((parameter.opts[0], *parameter.secondary_opts))
    flag = getattr(parameter, "is_flag", False)
    kind = "" if flag else _type(parameter.type_descriptor.annotation)
    default = parameter.default
    if callable(default) or default in (None, False, ()) or default == []:
        shown = ""
    else:
        shown = f"`{_relative(default)}`"
    yield f"| `{name}` | {kind} | {_cell(parameter.help or '')} | {shown} |"


def _relative(value: Any) -> Any:
    """A path in this checkout, relative to it."""
    if isinstance(value, Path) and value.is_relative_to(ROOT):
        return value.relative_to(ROOT)
    return value


# Configuration


def keys() -> str:
    """A section for each kind of drafter and policy and for the values around them, from the
    models that read configuration files."""
    from specdec_core.config import (
        DraftPlacement,
        PairConfiguration,
        PairSpec,
        Placement,
        RunnerSettings,
        Sampling,
        TargetPlacement,
    )
    from specdec_core.config.kinds import DRAFTERS, POLICIES, KindSettings, kinds_of
    from specdec_core.cost import Profile
    from specdec_core.drafting.heads.card import HeadTrainingSettings
    from specdec_core.prompts.source import PromptSource
    from specdec_core.search.load.trace import TraceRequest
    from specdec_core.search.load.workload import LiveSettings, Slo, Workload
    from specdec_core.search.plan import MeasuredForwards, Plan, RaceSettings
    from specdec_core.search.space import Trees
    from specdec_core.training.eagle.settings import EagleTrainingSettings
    from specdec_core.training.reduced_draft.settings import DraftTrainingSettings

    parts = ["## A pair and a configuration", _model(PairConfiguration)]
    parts += ["## A sweep", _model(Plan), "### Prompts", _model(PromptSource)]
    parts += ["### Race", _model(RaceSettings), "### Measured forwards", _model(MeasuredForwards)]
    parts += ["### Trees to search", _model(Trees), "### Profile", _model(Profile)]
    parts += ["## Workload", _model(Workload), "### Objective"]
    parts += [_model(Slo), "### A line of a trace", _model(TraceRequest)]
    parts += ["### Live runs", _model(LiveSettings)]
    parts += ["## Pair", _model(PairSpec), "## Runner"]
    parts += [_model(RunnerSettings), "## Sampling", _model(Sampling), "## Placement"]
    parts += [_model(Placement), "### Placement of the draft", _model(DraftPlacement)]
    parts += ["### Placement of the target", _model(TargetPlacement), "## Drafters"]
    parts += [
        f"### {kind}\n\n{_model(settings)}"
        for kind, settings in kinds_of(DRAFTERS, KindSettings).items()
    ]
    parts += ["## Length policies"]
    parts += [
        f"### {kind}\n\n{_model(settings)}"
        for kind, settings in kinds_of(POLICIES, KindSettings).items()
    ]
    parts += ["## Settings of a training", "`--set NAME=VALUE` of `specdec train …` changes them."]
    parts += ["### Of an EAGLE head", _model(EagleTrainingSettings)]
    parts += ["### Of a draft model", _model(DraftTrainingSettings)]
    parts += ["### Of acceptance heads", _model(HeadTrainingSettings)]
    return "\n\n".join(parts)


def _model(model: type[BaseModel]) -> str:
    """What a model is for and a row for each of its keys."""
    text = " ".join((model.__doc__ or "").split()).replace("*", "\\*")
    lines = [text, "", "| key | value | default | |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name == "kind":
            continue
        limits = ", ".join(str(rule) for rule in map(_limit, field.metadata) if rule)
        kind = _type(field.annotation) + (f", {limits}" if limits else "")
        default = _default(field)
        lines.append(f"| `{name}` | {_cell(kind)} | {default} | {_cell(field.description or '')} |")
    return "\n".join(lines)


def _default(field: FieldInfo) -> str:
    """A key's default, if it has one that can be written."""
    if field.default_factory is None:
        value = field.default
    elif field.default_factory_takes_validated_data:
        return ""  # it depends on other keys, as the model's text says
    else:
        value = field.get_default(call_default_factory=True)
    return "" if value is None or value is PydanticUndefined else f"`{_value(value)}`"


def _limit(rule: Any) -> str:
    for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        if (bound := getattr(rule, name, None)) is not None:
            return f"{sign} {bound:g}"
    return ""


def _type(annotation: Any) -> str:
    """A type as it is written in YAML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = ", ".join(filter(None, map(_limit, getattr(annotation, "__metadata__", ()))))
        return _type(arguments[0]) + (f" {limits}" if limits else "")
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        named = [_type(argument) for argument in arguments if argument is not type(None)]
        return " or ".join(dict.fromkeys(named))
    if origin in (tuple, list):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"mapping of {_type(arguments[0])} to {_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        kind = annotation.model_fields.get("kind")
        if kind is not None and kind.default is PydanticUndefined:
            return _any_kind(annotation)
        return f"`{kind.default}`" if kind is not None else annotation.__name__
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _any_kind(base: Any) -> str:
    """What may be of any kind of a base: the kinds, or where to find them if they are many."""
    from specdec_core.config.kinds import DRAFTERS, POLICIES, kinds_of

    drafts = base.role == "Drafter"
    kinds = kinds_of(DRAFTERS if drafts else POLICIES, base)
    if len(kinds) <= MOST_NAMED:
        return " or ".join(f"`{kind}`" for kind in kinds)
    return "any [drafter](#drafters)" if drafts else "any [length policy](#length-policies)"


def _value(value: Any) -> str:
    """A value as in YAML."""
    if isinstance(value, BaseModel):
        given = value.model_dump(mode="json", exclude_unset=True)
        kind = getattr(value, "kind", None)
        value = given if kind is None else {"kind": kind, **given}
    if isinstance(value, tuple):
        value = list(value)
    shown = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    return shown.removesuffix("...\n").strip()


def _cell(text: str) -> str:
    return escape(" ".join(text.split())).replace("|", "\\|")
