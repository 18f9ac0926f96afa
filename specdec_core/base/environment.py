"""The environment of a measurement: code, hardware, library versions."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

LIBRARIES = ("specdec", "torch", "transformers", "ray", "mlflow", "optuna")


def environment() -> dict[str, str]:
    """Facts about this process's machine and code, by name."""
    facts = {
        "python": platform.python_version(),
        "cpu": f"{_cpu_model()} × {os.cpu_count()}",
        "host": platform.node(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = f"{torch.cuda.get_device_name()} × {torch.cuda.device_count()}"
    # An installed copy may be inside a repository of something else.
    if _git("ls-files", Path(__file__).name) and (commit := _git("rev-parse", "HEAD")):
        changed = _git("status", "--porcelain", "--untracked-files=no")  # as git describe says it
        facts["git_commit"] = commit + ("-dirty" if changed else "")
    for library in LIBRARIES:
        try:
            facts[library] = version(library)
        except PackageNotFoundError:
            continue
    return facts


def machine() -> dict[str, str]:
    """The facts that the times of forwards depend on: processors and torch."""
    return {name: fact for name, fact in environment().items() if name in ("cpu", "gpu", "torch")}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _git(*arguments: str) -> str:
    """Output of git in the folder of this source; empty where no repository has it."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
