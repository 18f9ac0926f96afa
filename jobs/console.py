"""What every command shares: the console, and bad input as one line with exit code 2."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from specdec_core.base.errors import UserError

# Names may hold colons; `bundled:x:` is no emoji.
console = Console(highlight=False, emoji=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def program(name: str) -> str:
    """How to call one of this environment's programs from the current folder."""
    if shutil.which(name):
        return name
    return os.path.relpath(Path(sys.executable).with_name(name))


def print_runs_page(experiment: str, view: str | None = None) -> None:
    """Say where MLflow shows an experiment's runs, and how to start what shows them."""
    from dashboards.tracking import connect, experiment_id_of, tracking_uri
    from dashboards.views import runs_page

    page = runs_page(experiment_id_of(connect(), experiment), view)
    uri = tracking_uri()
    if uri.startswith("http"):
        lines = [f"{uri.rstrip('/')}/{page}"]
    else:
        ui = shlex.join([program("mlflow"), "ui", "--backend-store-uri", uri])
        lines = [ui, f"http://127.0.0.1:5000/{page}"]
    console.print(f"compare   {lines[0]}", *lines[1:], sep="\n          ", soft_wrap=True)


def run(command: Callable[..., None] | typer.Typer) -> None:
    """Run a typer application, or a function as one, turning a :class:`UserError` into one line
    on standard error and exit code 2."""
    if isinstance(command, typer.Typer):
        app = command
    else:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command()(command)
    try:
        app()
    except UserError as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}")
        sys.exit(2)
