"""The code of the guides runs as it stands there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(pages)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_command_of_a_guide_runs(tmp_path):
    """In all of Ray's processes, too, the kind is known."""
    environment = write_files("add-a-policy.md", tmp_path)
    [command] = [
        content for language, _, content in blocks("add-a-policy.md") if language == "bash"
    ]
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    command = command.replace("PYTHONPATH=. ", "")  # here the checkout's own code goes with it
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "margin" in done.stdout
