"""`specdec`: every job as a command. A job is imported only when it is run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from jobs.console import run

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
    "policies": "Compare length policies on recordings, by replay alone.",
    "plan-tree": "Propose the best static token tree from a recording.",
    "drift": "Measure how far lossy drafting drifts from the target.",
    "bandits": "Compare bandits over drafters with each of their arms alone.",
    "overlap": "Time a draft that drafts on while the target verifies (PEARL).",
    "long-form": "Measure speculative decoding along long texts.",
    "papers": "Write the papers' comparison tables for a pair.",
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
    "scale": "Measure how counting scales over nodes, and what limits it.",
    "fetch": "Install a small real model to try things on.",
    "train-pair": "Train the bundled pair from the standard library's source.",
}


def command(name: str) -> typer.Typer:
    """The program of one command, imported now."""
    job = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    job.command(name)(import_module(f"jobs.{name.replace('-', '_')}").main)
    return job


class Jobs(TyperGroup):
    """Lists the commands without importing them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in COMMANDS:
            return None
        listed = typer.Typer(add_completion=False)
        listed.command(name, help=COMMANDS[name])(lambda: None)
        return typer.main.get_command(listed)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and typer.main.get_command(command(name)), rest


app = typer.Typer(cls=Jobs, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def specdec() -> None:
    """Find, prove and serve the fastest speculative-decoding configuration for a pair of models."""


def main() -> None:
    run(app)


if __name__ == "__main__":
    main()
