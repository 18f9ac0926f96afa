"""`specdec`: every job as a command. A job is imported only when it is run."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from jobs.console import run

ROOT = Path(__file__).parents[1]
LAB = "lab "  # begins the names of studies

FIND, PROVE, SERVE, TRAIN, MORE = (
    "Find the fastest configuration",
    "Prove it",
    "Serve it, here or elsewhere",
    "Train what drafts",
    "Look closer",
)

# Panel and help of each command. Names with a blank are commands of a group.
COMMANDS = {
    "demo": (FIND, "Run the main job on the bundled pair or a chat model, to the champion."),
    "fetch": (FIND, "Install a small chat model, which every command then takes by its name."),
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
    "lab": (MORE, "Reproduce the papers' tables, and answer single questions."),
}


def studies() -> Mapping[str, str]:
    """The studies of `research` and what each is for. Only a checkout has them."""
    if not (ROOT / "research").is_dir():
        return {}
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    found: Mapping[str, str] = import_module("research").STUDIES
    return found


def command(name: str) -> typer.Typer:
    """The program of a command, as `bench offline`, or of a study, as `lab drift`, imported now."""
    place = re.sub("[- ]", "_", name)
    module = f"jobs.{place}"
    if name.startswith(LAB):
        module = f"research.{place.removeprefix('lab_')}.__main__"
    job = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    job.command(name.removeprefix(LAB))(import_module(module).main)
    return job


def _group(prefix: str, help: str) -> typer.Typer:
    """A group of the commands whose names begin with `prefix`. Help lists them without importing
    them; the one that runs is imported."""
    labs = {f"{LAB}{name}": (MORE, help) for name, help in studies().items()}
    groups = {name: row for name, row in GROUPS.items() if name != "lab" or labs}
    every = {**COMMANDS, **groups, **labs}
    rows = {name.removeprefix(prefix): every[name] for name in every if name.startswith(prefix)}

    class Group(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return [name for name in rows if " " not in name]

        def get_command(self, ctx: Any, name: str) -> Any:
            if name not in rows:
                return None
            panel, help = rows[name]
            listed = typer.Typer(add_completion=False)
            listed.command(name, help=help, rich_help_panel=None if prefix else panel)(lambda: None)
            return typer.main.get_command(listed)

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, _, rest = super().resolve_command(ctx, args)
            if name and rest and f"{name} {rest[0]}" in COMMANDS:  # `serve keys`
                name, rest = f"{name} {rest[0]}", rest[1:]
            return name, name and typer.main.get_command(_program(f"{prefix}{name}")), rest

    group = typer.Typer(cls=Group, add_completion=False, pretty_exceptions_enable=False)
    group.callback(help=help)(lambda: None)
    return group


def _program(name: str) -> typer.Typer:
    """The program of a command or group."""
    return _group(f"{name} ", GROUPS[name][1]) if name in GROUPS else command(name)


app = _group(
    "",
    "Find, prove and serve the fastest speculative-decoding configuration for a pair of models.",
)


def main() -> None:
    run(app)


if __name__ == "__main__":
    main()
