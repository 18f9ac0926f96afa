"""A workspace that a real sweep has made works wherever it lies, also with models in it that were
named by their path."""

import shutil

import pytest
from mlflow.tracking._tracking_service import utils

from jobs import deploy, export, generate, record, report, sweep
from jobs.choice import choose
from specdec_core.models.pair import load_pair
from specdec_core.search.folder import SweepFolder
from specdec_core.search.results import SweepResult
from tests.commands import QUICK, plan_file, printed, prompts_file

POLICY = {"kind": "fixed", "max_tokens": [1, 2]}
SEARCH = [{"drafter": {"kind": "draft_model", "policy": POLICY}}]


def done(result):
    utils._artifact_repos_cache.clear()  # the next command is another process's
    return printed(result)


def named(home):
    """The options that name what lies in the workspace, by absolute paths."""
    models = home / "models"
    pair = ("--target", models / "target", "--draft", f"draft={models / 'draft'}")
    return (*pair, "--prompts", home / "prompts.jsonl")


def recorded(command, home):
    return command(record.main, home, *named(home), "--max-new-tokens", 12)


def swept(command, home):
    return command(sweep.main, home, "--config", home / "sweep.yaml", *named(home))


def tree(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.long
def test_a_workspace_goes_on_where_it_was_moved_or_copied_to(
    command, ray_running, tiny_pair_folders, tmp_path
):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for name, folder in tiny_pair_folders.items():
        shutil.copytree(folder, first / "models" / name)
    plan_file(first, **QUICK, max_new_tokens=12, search=SEARCH)
    prompts_file(first, (f"x{i} = {i}" for i in range(3)))
    done(recorded(command, first))
    done(swept(command, first))
    (folder,) = (first / "sweeps").iterdir()
    result = SweepResult.load(folder)
    drafting = (t.id for t in result.trials if t.configuration.drafter is not None)
    champion = next(id for id in drafting if id != result.champion)
    done(command(deploy.main, first, "--promote", champion, "--uncertified"))
    done(command(export.main, first, "--to", "vllm"))

    shutil.copytree(first, second)
    original = tree(first)
    works(command, second, champion)
    assert tree(first) == original

    shutil.rmtree(first)
    shutil.move(second, third)
    works(command, third, champion)
    assert not first.exists()
    assert not second.exists()
    exported = "".join(file.read_text() for file in (third / "export").glob("*/*"))
    assert f"{third}/" in exported
    assert exported.count("/models/") == exported.count(f"{third}/models/")

    # What was not finished is taken up again.
    last = max((third / "sweeps").iterdir(), key=lambda path: path.stat().st_mtime)
    (last / "finished").unlink()
    (last / "sweep.json").unlink()
    kept = {file: file.stat().st_mtime_ns for file in (last / "trials").iterdir()}
    fourth = shutil.move(third, tmp_path / "fourth")
    done(swept(command, fourth))
    assert SweepFolder(fourth / "sweeps" / last.name).finished
    trials = (fourth / "sweeps" / last.name / "trials").iterdir()
    assert {file.name: file.stat().st_mtime_ns for file in trials} == {
        file.name: time for file, time in kept.items()
    }
    assert not third.exists()


def works(command, home, champion):
    """Every command finds in the workspace what it holds."""
    assert "(champion, version " in done(command(generate.main, home, "x1 = "))
    chosen, _, _ = choose(None)  # as `serve` does
    assert chosen.configuration.id == champion
    load_pair(chosen.pair)
    done(command(report.main, home))
    done(recorded(command, home))
    assert len(list((home / "traces").iterdir())) == 1
    done(command(export.main, home, "--to", "vllm"))
    sweeps = len(list((home / "sweeps").iterdir()))
    done(swept(command, home))
    assert len(list((home / "sweeps").iterdir())) == sweeps + 1
    done(command(deploy.main, home, "--promote", champion, "--uncertified"))
