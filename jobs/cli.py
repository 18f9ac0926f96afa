"""`specdec`: every job as a command. A job is imported only when it is run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from jobs.console import run

ROOT = Path(__file__).parents[1]

COMMANDS = {
    "demo": "Run the main job on the bundled pair or a chat model, from recording to champion.",
    "profile": "Measure what forwards of a pair cost.",
    "record": "Record what drafts would do, to train heads and to replay.",
    "train-head": "Train heads that predict acceptance, on recordings.",
    "train-eagle": "Train an EAGLE-3 head for a target, on the target's own answers.",
    "pack-eagle": "Store a trained EAGLE head in eight bits, with a README.",
    "train-draft": "Distil a draft with a reduced vocabulary from its target's own answers.",
    "pack-draft": "Store a trained draft in eight bits, with a README.",
    "datastore": "Build a datastore to retrieve candidate tokens from.",
    "capacity": "Simulate load: how many replicas a rate of requests needs.",
    "schedule": "Choose a configuration for each range of load, and time the best.",
    "sweep": "Find the fastest configuration for a pair and its prompts.",
    "export": "Write a configuration as the settings of the server that you run.",
    "scan": "Time another server's settings, and hold their ranking by replay against that.",
    "report": "Write a sweep's HTML report again.",
    "certify": "Show that a configuration changes nothing but the speed.",
    "promote": "Make another configuration of a sweep the champion.",
    "serve": "Serve the champion over HTTP, OpenAI-compatible.",
    "deploy": "Have a running server serve another configuration, without a pause.",
    "rollback": "Have a running server serve what it served before.",
    "conformance": "Check a server with the clients of the field.",
    "watch": "Watch a server with Prometheus and Grafana.",
    "make-key": "Make an API key for a server's file of keys.",
    "generate": "Complete a prompt and show where the tokens came from.",
    "bench": "Time this engine against transformers and vLLM.",
    "fetch": "Install a small real model to try things on.",
    "train-pair": "Train the bundled pair from the standard library's source.",
}
LAB = "Reproduce the papers' tables, and answer single questions."


def studies() -> Mapping[str, str]:
    """The studies of `research` and what each is for. Only a checkout has them."""
    if not (ROOT / "research").is_dir():
        return {}
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    studies: Mapping[str, str] = import_module("research").STUDIES
    return studies


def command(name: str) -> typer.Typer:
    """The program of one command, imported now."""
    return _program(name, f"jobs.{name.replace('-', '_')}")


def study(name: str) -> typer.Typer:
    """The program of one study, imported now."""
    return _program(name, f"research.{name.replace('-', '_')}.__main__")


def _program(name: str, module: str) -> typer.Typer:
    job = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    job.command(name)(import_module(module).main)
    return job


class Listed(TyperGroup):
    """Lists the commands of `listed` without importing them."""

    listed: Mapping[str, str] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.listed]

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in self.listed:
            return None
        program = typer.Typer(add_completion=False)
        program.command(name, help=self.listed[name])(lambda: None)
        return typer.main.get_command(program)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and typer.main.get_command(self.program(name)), rest

    def program(self, name: str) -> typer.Typer:
        raise NotImplementedError


class Studies(Listed):
    listed = studies()

    def program(self, name: str) -> typer.Typer:
        return study(name)


lab = typer.Typer(cls=Studies, add_completion=False, pretty_exceptions_enable=False)
lab.callback(help=LAB)(lambda: None)


class Jobs(Listed):
    listed: Mapping[str, str] = {**COMMANDS, **({"lab": LAB} if Studies.listed else {})}

    def program(self, name: str) -> typer.Typer:
        return lab if name == "lab" else command(name)


app = typer.Typer(cls=Jobs, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def specdec() -> None:
    """Find, prove and serve the fastest speculative-decoding configuration for a pair of models."""


def main() -> None:
    run(app)


if __name__ == "__main__":
    main()
