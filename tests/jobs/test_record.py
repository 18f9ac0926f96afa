"""`specdec record` says what it recorded, survives Ctrl-C without repeating work, and refuses bad
input."""

import signal

import pytest

from jobs import record
from specdec_core.recordings.schema import Recording
from tests.commands import UNTRIED, assert_shown, plan_file, printed, prompts_file, stopped


def whole_shards(home):
    """Files of whole shards and when they were written."""
    return {file: file.stat().st_mtime_ns for file in home.glob("traces/*/prompts/shard-*.parquet")}


@pytest.mark.parametrize("drafter", UNTRIED)
@pytest.mark.parametrize("drafts", [{}, {"mine": "y"}], ids=str)
def test_a_sweep_file_gives_its_settings_whatever_it_searches(
    command, tmp_path, monkeypatch, drafts, drafter
):
    """A head in it may have to be trained on this recording first."""
    recorded = []
    monkeypatch.setattr(record, "record", lambda plan, *_: recorded.append(plan))
    monkeypatch.setattr(record, "show", lambda _: None)
    config = plan_file(tmp_path, max_new_tokens=7, search=[{"drafter": drafter}])
    named = [f"--draft={name}={model}" for name, model in drafts.items()]
    printed(command(record.main, tmp_path, "--config", config, "--target", "x", *named))
    assert [(plan.pair.drafts, plan.max_new_tokens) for plan in recorded] == [(drafts, 7)]


@pytest.mark.long
def test_a_recording_goes_on_after_ctrl_c_and_says_what_it_holds(
    command, ray_running, tiny_pair_folders, tmp_path
):
    prompts = prompts_file(tmp_path, (f"x{i} = {i}" for i in range(64)))
    target, draft = (str(tiny_pair_folders[name]) for name in ("target", "draft"))
    plan = {
        "pair": {"target": target, "drafts": {"noisy": draft}},
        "prompts": {"source": str(prompts)},
        "max_new_tokens": 64,
        "search": [{"drafter": {"kind": "draft_model"}}],
    }
    config = plan_file(tmp_path, **plan)
    home = tmp_path / "home"
    arguments = ["--config", config, "--limit", "60", "--max-draft", "9"]

    driver = ["-m", "jobs.record", *arguments]
    output = stopped(home, driver, lambda: whole_shards(home), signal.SIGINT)
    assert "the same command resumes" in output
    assert "Traceback" not in output
    first = whole_shards(home)
    assert 0 < len(first) < 8

    done = command(record.main, home, *arguments)
    assert f"resuming: {8 * len(first)} of 60 prompts done" in printed(done)
    assert whole_shards(home).items() >= first.items()  # nothing was written again
    (folder,) = (home / "traces").iterdir()
    recording = Recording.open(folder)
    assert len(recording.prompts.ids) == 60
    assert (recording.header.max_new_tokens, recording.header.max_draft) == (64, 9)
    tokens = sum(map(len, recording.prompts.outputs))
    agreement = recording.trace("noisy").agrees.mean()
    assert_shown(done, "noisy", f"{agreement:.3f}", f"60 prompts, {tokens:,} tokens", folder)
    assert_shown(done, f"train head --recording {folder}", f"sweep --traces {folder}")
