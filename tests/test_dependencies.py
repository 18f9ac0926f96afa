"""What the product imports is what it declares."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGES = ("specdec_core", "cluster", "dashboards", "jobs")
# In environments of their own: a GPU build of torch brings triton, the plug-in is inside of vLLM.
ELSEWHERE = {"triton", "vllm"}


def name_of(requirement):
    """A requirement's distribution, spelled as an index does."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def imported():
    """Each package that is imported from outside, and a file that does it."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    modules = [node.module]
                found.update((module.split(".")[0], file) for module in modules)
    ours = {*sys.stdlib_module_names, *PACKAGES, *ELSEWHERE}
    return {name: file for name, file in found.items() if name not in ours}


def test_every_imported_package_is_declared_and_constrained():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = set(map(name_of, [*project["dependencies"], *extras["gguf"]]))
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constrained = {name_of(line) for line in lines if line[:1].isalnum()}
    distributions = packages_distributions()
    missing = [
        f"{name} ({file.relative_to(ROOT)})"
        for name, file in imported().items()
        if declared.isdisjoint(map(name_of, distributions.get(name, [name])))
    ]
    assert not missing, f"imported and not declared in pyproject.toml: {', '.join(missing)}"
    assert declared | set(map(name_of, extras["dev"])) <= constrained


def test_the_tested_versions_are_in_the_declared_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [each for extra in project["optional-dependencies"].values() for each in extra]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.split(";")[0].strip().split("==") for line in lines if "==" in line)
    tested = {name_of(name): version for name, version in tested.items()}
    for each in map(Requirement, [*project["dependencies"], *extras]):
        assert each.specifier.contains(tested[name_of(each.name)], prereleases=True), each
