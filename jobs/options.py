"""Options that commands share, and how their values are read."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from typer import Option

from specdec_core.base.errors import UserError
from specdec_core.base.names import check_name
from specdec_core.base.workspace import workspace
from specdec_core.config import PairSpec, Value, overridden, parse

Number = TypeVar("Number", int, float, str)
Parsed = TypeVar("Parsed", bound=Value)

Target = Annotated[
    str | None,
    Option(help="Target model: hub id, folder, GGUF file, package:<name> or bundled:<name>."),
]
Drafts = Annotated[
    list[str] | None,
    Option(
        help="Draft model: hub id, folder, GGUF file or bundled:<name>; NAME=MODEL names it;"
        " repeatable."
    ),
]
_PROMPTS = Option(
    help="Prompts: JSONL file, hub id or bundled:<name>; several, separated by commas, are mixed."
)
Prompts = Annotated[str, _PROMPTS]
MaybePrompts = Annotated[str | None, _PROMPTS]
ChatTemplate = Annotated[
    str,
    Option(
        help="Prompts that a template renders. auto: chats, by the tokenizer's template; always:"
        " plain texts, too, as a message; none: no prompt; a file: all, by its Jinja template."
    ),
]
MaybeChatTemplate = Annotated[
    str | None,
    Option(
        help="Prompts that a template renders: auto (chats, by the tokenizer's template), always,"
        " none, or a file with a Jinja template; unset, as in the sweep file, or auto."
    ),
]
MaxLength = Annotated[
    int | None,
    Option(help="Tokens of prompt and output together that fit: the pair's runner.max_length."),
]
Compile = Annotated[
    bool | None,
    Option(
        "--compile/--no-compile",
        help="Compiled graphs, made at the first start: the pair's runner.compile; unset, as in"
        " the file.",
    ),
]
Limit = Annotated[int, Option(min=1, help="Use the first n prompts.")]
MaybeLimit = Annotated[int | None, Option(min=1, help="Use the first n prompts.")]
Tokens = Annotated[int, Option(min=1, help="New tokens for each prompt.")]
MaybeTokens = Annotated[int | None, Option(min=1, help="New tokens for each prompt.")]
Repeats = Annotated[int, Option(min=1, help="Times each prompt is decoded.")]
Name = Annotated[str | None, Option(help="Name of the result's folder.")]
Fresh = Annotated[bool, Option("--fresh", help="Do not resume.")]
ProfileFile = Annotated[
    Path | None,
    Option(
        help="The pair's forward times: a file of `specdec profile`, or a few figures (YAML);"
        " unset, the workspace's, measured if missing."
    ),
]
Traces = Annotated[
    str | None,
    Option(help="Recording to replay, a folder or a name; unset, the latest that fits the pair."),
]
ServerModel = Annotated[
    str | None, Option(help="With --server: which of its models; unset, the only one.")
]
SweepFile = Annotated[
    Path | None, Option(help="Sweep file whose pair and settings to take where none are given.")
]
Config = Annotated[
    Path | None,
    Option(
        help="YAML with `pair` and `configuration`, or the beginning of a configuration's id in a"
        " finished sweep; unset, the champion."
    ),
]
Placed = Annotated[
    Path | None, Option(help="Placement (YAML): the devices that draft and target are on.")
]
DType = Annotated[
    str | None, Option(help="Data type of all models: auto, float32, bfloat16 or float16.")
]


TrainingSettings = Annotated[
    list[str] | None,
    Option(
        "--set",
        help="A setting of the training, as epochs=5; repeatable. See the manual's Configuration.",
    ),
]


def given(**values: Any) -> dict[str, Any]:
    """The options that were given."""
    return {key: value for key, value in values.items() if value is not None}


def parse_drafts(specs: list[str] | None) -> dict[str, str]:
    """`[name=]model` options as a pair's drafts; unnamed ones are called by the model's name."""
    drafts: dict[str, str] = {}
    for spec in specs or []:
        name, separator, model = spec.partition("=")
        if not separator:
            name, model = Path(spec).name.rpartition(":")[2], spec
        if not name or not model:
            raise UserError(f"--draft {spec}: expected [name=]model")
        if name in drafts:
            raise UserError(
                f"--draft {spec}: there is a draft {name!r} already; name it: name={model}"
            )
        drafts[name] = model
    return drafts


def pair_changes(
    target: str | None,
    drafts: list[str] | None,
    max_length: int | None,
    compile: bool | None = None,
) -> dict[str, Any]:
    """The changes that the options make to the pair in a file. Another target has no drafts unless
    `--draft` names some."""
    named = parse_drafts(drafts) if drafts or target is not None else None
    runner = given(max_length=max_length, compile=compile) or None
    return given(target=target, drafts=named, runner=runner)


def chosen_pair(
    base: PairSpec,
    target: str | None,
    drafts: list[str] | None,
    max_length: int | None = None,
    compile: bool | None = None,
) -> PairSpec:
    """`base` with the changes of the options. Raises :class:`UserError` for a wrong length, and for
    a name that no draft can have."""
    changes = pair_changes(target, drafts, max_length, compile)
    changed = overridden({"pair": base.model_dump()}, {"pair": changes})
    return parse(PairSpec, changed["pair"], "pair")


def numbers(text: str, option: str, kind: type[Number]) -> tuple[Number, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{option} {text}: expected numbers as 1,2,4") from None


def sizes(text: str, option: str) -> tuple[int, ...]:
    """Positive whole numbers separated by commas."""
    with suppress(UserError):
        if min(values := numbers(text, option, int)) > 0:
            return values
    raise UserError(f"{option} {text}: expected positive numbers as 1,2,4")


def training_settings(kind: type[Parsed], changes: list[str] | None, **values: Any) -> Parsed:
    """The settings of a training: those of `values` that were given, with the `changes` that
    `--set` names. Raises :class:`UserError`."""
    changed = dict(map(setting, changes or []))
    if "learning_rate" in changed:
        raise UserError("--set learning_rate: --learning-rate is the option for it")
    return parse(kind, given(**values) | changed, "training settings")


def setting(text: str) -> tuple[str, Any]:
    """A setting and its value, of name=value. Raises :class:`UserError`."""
    name, separator, value = text.partition("=")
    if not separator:
        raise UserError(f"--set {text}: expected name=value")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"--set {text}: {value} is no YAML value") from None


def result_folder(kind: str, name: str | None, about: str) -> Path:
    """The folder for a result of a kind in the workspace: `name`, or what it is `about` and the
    time. Raises :class:`UserError` where it exists, and for a name that cannot be a folder's."""
    check_name(name)
    folder = workspace() / kind / (name or f"{about}-{datetime.now():%Y%m%d-%H%M%S}")
    if folder.exists():
        raise UserError(f"{folder} exists: give another --name")
    return folder
