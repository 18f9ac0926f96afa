"""The manual builds without a broken link, and the code of the guides runs."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from jobs.cli import COMMANDS
from specdec_core.config import PairConfiguration
from specdec_core.config.kinds import DRAFTERS, POLICIES
from specdec_core.search.plan import load_plan
from tests.commands import ROOT, ran


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder
    ran(*command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return folder


def test_every_command_and_every_kind_has_its_section(site):
    commands = (site / "reference" / "commands.html").read_text()
    for name in COMMANDS:
        assert f"specdec {name}" in commands
    configuration = (site / "reference" / "configuration.html").read_text()
    for kind in (*DRAFTERS, *POLICIES):
        assert f'<h3 id="{kind}' in configuration
    for model in (
        *("a-pair-and-a-configuration", "prompts", "race", "measured-forwards"),
        *("trees-to-search", "profile", "placement-of-the-draft", "placement-of-the-target"),
    ):
        assert f'id="{model}"' in configuration


def test_no_page_shows_what_has_no_value(site):
    assert [p.name for p in site.rglob("*.html") if "PydanticUndefined" in p.read_text()] == []


def test_the_files_on_the_page_of_the_configuration_are_read(tmp_path):
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    blocks = dict(re.findall(r'```yaml title="(.*?)"\n(.*?)```', page, re.DOTALL))
    for name, content in blocks.items():
        (tmp_path / name).write_text(content)
    one = PairConfiguration.load(tmp_path / "configuration.yaml")
    assert one.configuration.family == "svip"
    assert len(load_plan(tmp_path / "sweep.yaml").configurations or []) == 2


def test_no_page_shows_the_markup_of_docstrings(site):
    roles = re.compile(r":(class|mod|func|meth):")
    assert [page.name for page in site.rglob("*.html") if roles.search(page.read_text())] == []


def test_the_readme_names_no_file_that_is_not_there():
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"\]\(([^)#:]+)[^)]*\)", text)
    assert len(named) >= 15
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert len(text.splitlines()) <= 150


GUIDES = ROOT / "docs" / "guides"
# A file has a title that ends in its suffix; what stands under any other title is only shown.
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# Runs the code of each page, in the page's folder.
PROGRAM = """
import json, os, sys
for folder, code in json.loads(sys.argv[1]):
    os.chdir(folder)
    sys.path.insert(0, folder)
    exec(compile(code, folder, "exec"), {"__name__": "__main__"})
"""


def blocks(page):
    """Language, title and content of the code on a page."""
    return BLOCK.findall((GUIDES / page).read_text())


def write_files(page, folder):
    """Write what the page says are files; returns the environment to use them in."""
    for _, title, content in blocks(page):
        if "." in title:
            (folder / title).write_text(content)
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "SPECDEC_HOME": str(folder / "home")}


def test_the_code_of_the_guides_runs(tmp_path):
    pages = []
    for page in ("add-a-policy.md", "add-a-drafter.md", "add-a-figure.md", "add-a-server.md"):
        folder = tmp_path / page
        folder.mkdir()
        environment = write_files(page, folder)
        code = [
            text for language, title, text in blocks(page) if (language, title) == ("python", "")
        ]
        assert len(code) >= 2
        pages.append((str(folder), "\n".join(code)))
    ran(sys.executable, "-c", PROGRAM, json.dumps(pages), env=environment)


@pytest.mark.long
def test_the_command_of_a_guide_runs(tmp_path):
    """In all of Ray's processes, too, the kind is known."""
    environment = write_files("add-a-policy.md", tmp_path)
    [command] = [
        content for language, _, content in blocks("add-a-policy.md") if language == "bash"
    ]
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    command = command.replace("PYTHONPATH=. ", "")  # here the checkout's own code goes with it
    assert "margin" in ran("bash", "-c", command, cwd=tmp_path, env=environment)
