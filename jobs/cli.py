"""`specdec`: every job as a command. A job is imported only when it is run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from jobs.console import run

ROOT = Path(__file__).parents[1]
Program = Callable[[str], typer.Typer]
Rows = Mapping[str, tuple[str | None, str]]  # panel and help, by name

FIND, PROVE, SERVE, TRAIN, MORE = (
    "Find the fastest configuration",
    "Prove it",
    "Serve it, here or elsewhere",
    "Train what drafts",
    "Look closer",
)

# Names with a blank are commands of a group.
COMMANDS = {
    "demo": (FIND, "Run the main job on the bundled pair or a chat model, to the champion."),
    "record": (FIND, "Record what drafts would do, to replay it and to train heads."),
    "profile": (FIND, "Measure what forwards of a pair cost."),
    "sweep": (FIND, "Find the fastest configuration for a pair, its prompts and its load."),
    "report": (FIND, "Write a sweep's HTML report again."),
    "certify": (PROVE, "Show that a configuration changes nothing but the speed."),
    "bench offline": (PROVE, "Time this engine against transformers and vLLM."),
    "bench serve": (PROVE, "Compare servers under load: this one, vLLM's and llama.cpp's."),
    "serve": (SERVE, "Serve the champion over HTTP, OpenAI-compatible."),
    "serve keys": (SERVE, "Make an API key for a server's file of keys."),
    "deploy": (SERVE, "Have a running server serve another configuration, or go back."),
    "capacity": (SERVE, "Simulate load: how many replicas a rate of requests needs."),
    "export": (SERVE, "Write a configuration as the settings of the server that you run."),
    "train head": (TRAIN, "Train heads that predict acceptance, on recordings."),
    "train eagle": (TRAIN, "Train an EAGLE-3 head for a target, on the target's own answers."),
    "train draft": (TRAIN, "Distil a draft model from its target's own answers."),
    "generate": (MORE, "Complete a prompt and show where the tokens came from."),
}
GROUPS = {
    "bench": (PROVE, "Time this engine or its server against what people use instead."),
    "train": (TRAIN, "Train acceptance heads, EAGLE heads and draft models."),
}
LAB = (MORE, "Reproduce the papers' tables, and answer single questions.")


def studies() -> Mapping[str, str]:
    """The studies of `research` and what each is for. Only a checkout has them."""
    if not (ROOT / "research").is_dir():
        return {}
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    found: Mapping[str, str] = import_module("research").STUDIES
    return found


def command(name: str) -> typer.Typer:
    """The program of one command, imported now."""
    return _program(name, f"jobs.{re.sub('[- ]', '_', name)}")


def study(name: str) -> typer.Typer:
    """The program of one study, imported now."""
    return _program(name, f"research.{name.replace('-', '_')}.__main__")


def _program(name: str, module: str) -> typer.Typer:
    job = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    job.command(name)(import_module(module).main)
    return job


def _group(help: str, rows: Rows, program: Program) -> typer.Typer:
    """A group of commands. Help lists `rows` without importing the commands; `program` imports the
    one that runs."""

    class Group(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return [*rows]

        def get_command(self, ctx: Any, name: str) -> Any:
            if name not in rows:
                return None
            panel, help = rows[name]
            listed = typer.Typer(add_completion=False)
            listed.command(name, help=help, rich_help_panel=panel)(lambda: None)
            return typer.main.get_command(listed)

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, _, rest = super().resolve_command(ctx, args)
            if name and rest and f"{name} {rest[0]}" in COMMANDS:  # `serve keys`
                name, rest = f"{name} {rest[0]}", rest[1:]
            return name, name and typer.main.get_command(program(name)), rest

    group = typer.Typer(cls=Group, add_completion=False, pretty_exceptions_enable=False)
    group.callback(help=help)(lambda: None)
    return group


def _top(name: str) -> typer.Typer:
    """The program of a command or group of the first level."""
    if name == "lab":
        return _group(LAB[1], {n: (None, help) for n, help in studies().items()}, study)
    if name not in GROUPS:
        return command(name)
    prefix = f"{name} "
    inner = {
        each.removeprefix(prefix): (None, help)
        for each, (_, help) in COMMANDS.items()
        if each.startswith(prefix)
    }
    return _group(GROUPS[name][1], inner, lambda each: command(prefix + each))


app = _group(
    "Find, prove and serve the fastest speculative-decoding configuration for a pair of models.",
    {
        name: row
        for name, row in {**COMMANDS, **GROUPS, "lab": LAB}.items()
        if " " not in name and (name != "lab" or studies())
    },
    _top,
)


def main() -> None:
    run(app)


if __name__ == "__main__":
    main()
