"""What is installed without the checkout."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, ran

PACKAGES = ("specdec_core", "cluster", "dashboards", "jobs")


def run(*command, folder):
    """What a command prints, in a folder and an environment that know nothing of the checkout."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return ran(*command, cwd=folder, env=environment)


@pytest.mark.long
def test_the_wheel_alone_runs_the_demo(tmp_path):
    source, built, environment, folder = (
        tmp_path / name for name in ("source", "built", "environment", "empty")
    )
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", built, folder=source)
    run(sys.executable, "-m", "venv", environment, folder=tmp_path)
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet"]
    run(*pip, "--constraint", ROOT / "constraints.txt", next(built.iterdir()), folder=tmp_path)
    folder.mkdir()
    where = "import specdec_core, jobs; print(specdec_core.__file__, jobs.__file__)"
    files = run(environment / "bin" / "python", "-c", where, folder=folder).split()
    assert all(Path(file).is_relative_to(environment) for file in files)
    demo = run(environment / "bin" / "specdec", "demo", folder=folder)
    assert "report.html" in demo
    [report] = folder.glob("sweeps/*/report.html")
    assert "frontier" in report.read_text(encoding="utf-8")
    assert (folder / "mlflow.db").exists()
