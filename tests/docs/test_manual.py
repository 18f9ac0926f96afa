"""The manual builds without a broken link, and its reference has every command and kind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.cli import COMMANDS
from specdec_core.config import PairConfiguration
from specdec_core.config.kinds import DRAFTERS, POLICIES
from specdec_core.search.plan import load_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_command_and_every_kind_has_its_section(site):
    commands = (site / "reference" / "commands.html").read_text()
    for name in COMMANDS:
        assert f"specdec {name}" in commands
    configuration = (site / "reference" / "configuration.html").read_text()
    for kind in (*DRAFTERS, *POLICIES):
        assert f'<h3 id="{kind}' in configuration
    for model in (
        *("a-pair-and-a-configuration", "prompts", "race", "profile", "trees-to-search"),
        *("forward-times-of-another-machine", "placement-of-the-draft"),
        "placement-of-the-target",
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
