import json
import shutil
import sys
from pathlib import Path

import pytest

from specdec_core.base.errors import UserError
from specdec_core.base.workspace import as_first_placed, present_path, remember, workspace
from tests.commands import ROOT, ran


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.delenv("SPECDEC_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.mark.parametrize(
    ("home", "found"),
    [
        (None, "work"),
        ("", "work"),
        ("here", "work/here"),
        ("~/runs", "home/runs"),
        ("{}/a/b", "a/b"),
    ],
)
def test_the_workspace_is_specdec_home_or_the_current_folder(tmp_path, monkeypatch, home, found):
    if home is not None:
        monkeypatch.setenv("SPECDEC_HOME", home.format(tmp_path))
    assert workspace() == tmp_path / found
    assert workspace().is_dir()


def test_specdec_home_that_is_a_file_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"SPECDEC_HOME.*file exists"):
        workspace()


def test_rays_copy_of_a_working_folder_is_not_written_to(tmp_path, monkeypatch):
    copy = tmp_path / "session" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123"
    (copy / "jobs").mkdir(parents=True)
    for folder in (copy, copy / "jobs"):
        monkeypatch.chdir(folder)
        assert workspace() == tmp_path / "home" / ".specdec"
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "chosen"))
    assert workspace() == tmp_path / "chosen"


def test_ray_still_names_its_copies_that_way():
    from ray._private.runtime_env import packaging, working_dir

    assert packaging.RAY_PKG_PREFIX == "_ray_pkg_"
    plugin = working_dir.WorkingDirPlugin(".", gcs_client=None)
    assert Path(plugin._resources_dir).name == "working_dir_files"


def test_reading_the_workspace_loads_no_framework():
    code = (
        "import sys, specdec_core.base.workspace;"
        " print('torch' in sys.modules, 'ray' in sys.modules)"
    )
    assert ran(sys.executable, "-c", code, cwd=ROOT).split() == ["False", "False"]


def test_what_lay_in_a_moved_workspace_is_found_in_it(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "é second"
    (first / "drafts" / "a").mkdir(parents=True)
    monkeypatch.setenv("SPECDEC_HOME", str(first))
    named = str(first / "drafts" / "a")
    remember(first)
    plan = as_first_placed(json.dumps({"draft": named}))
    assert present_path(named) == named
    first.rename(second)
    monkeypatch.setenv("SPECDEC_HOME", str(second))
    moved = str(second / "drafts" / "a")
    assert present_path(named) == moved
    assert as_first_placed(json.dumps({"draft": moved})) == plan
    for other in ("org/model", f"{first}/gone", "./drafts/a", "/nowhere/drafts/a"):
        assert present_path(other) == other
    remember(second)
    named = str(second / "drafts" / "a")
    second.rename(first)  # and back
    monkeypatch.setenv("SPECDEC_HOME", str(first))
    assert present_path(named) == str(first / "drafts" / "a")


def test_a_copy_may_name_what_the_original_has(tmp_path, monkeypatch):
    original, copy = tmp_path / "original", tmp_path / "copy"
    (original / "drafts" / "a").mkdir(parents=True)
    remember(original)
    shutil.copytree(original, copy)
    monkeypatch.setenv("SPECDEC_HOME", str(copy))
    assert present_path(str(original / "drafts" / "a")) == str(original / "drafts" / "a")
