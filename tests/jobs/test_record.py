"""`specdec record` says what it recorded, survives Ctrl-C without repeating work, and refuses bad
input."""

import signal
from pathlib import Path

import pytest

from jobs import record
from jobs.options import chosen_pair
from specdec_core.config import PairSpec, Sampling
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.recordings.schema import Header, Recording
from specdec_core.search.plan import load_plan
from tests.commands import plan_file, printed, prompts_file, stopped

SUFFIX = [{"drafter": {"kind": "suffix"}}]


def whole_shards(home):
    """Files of whole shards and when they were written."""
    return {file: file.stat().st_mtime_ns for file in home.glob("traces/*/prompts/shard-*.parquet")}


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
    for shown in ("noisy", f"{agreement:.3f}", f"60 prompts, {tokens:,} tokens", str(folder)):
        assert shown in done.stdout
    for following in (f"train-head --recording {folder}", f"sweep --prompts {prompts} --limit 60"):
        assert following in done.stdout


def recorded(pair, **sampling):
    header = Header(
        pair=pair,
        fingerprints={},
        eos_token_ids=(),
        prompts=PromptSet(source="p.jsonl", count=3, digest="d"),
        sampling=Sampling.model_validate(sampling),
        max_new_tokens=16,
        mixing=0,
    )
    return Recording(Path("traces/r"), header)


def test_the_sweep_that_follows_is_of_the_recordings_pair(tmp_path):
    ends = ["--prompts", "p.jsonl", "--limit", "3", "--max-new-tokens", "16"]
    assert record.following(recorded(PairSpec())) == {"replay": ["sweep", *ends]}
    other = chosen_pair(PairSpec(), "T", ["small=D"], 2048, True)
    named = ["--target", "T", "--draft", "small=D", "--max-length", "2048", "--compile"]
    assert record.following(recorded(other)) == {"replay": ["sweep", *named, *ends]}
    pair = {"target": "T", "drafts": {"small": "D"}, "runner": {"max_length": 2048}}
    config = plan_file(tmp_path, pair=pair, search=SUFFIX)
    plan = load_plan(config)
    replay = ["sweep", "--config", str(config), "--compile", *ends]
    assert record.following(recorded(other), config, plan) == {"replay": replay}


def test_no_sweep_follows_that_samples_otherwise(tmp_path):
    coupled = {"temperature": 1.0, "coupling": "gumbel"}
    assert record.following(recorded(PairSpec(), **coupled)) == {}
    config = plan_file(tmp_path, sampling=coupled, search=SUFFIX)
    plan = load_plan(config)
    assert "replay" in record.following(recorded(PairSpec(), **coupled), config, plan)
    assert record.following(recorded(PairSpec()), config, plan) == {}
