"""`specdec sweep` survives Ctrl-C and kill -9 without repeating work, and refuses bad input."""

import signal

import pandas as pd
import pytest
import torch

from jobs import record, sweep
from jobs.choice import read_config
from jobs.options import parse_drafts
from specdec_core.base.errors import UserError
from specdec_core.search.load.schedule import drafter_at
from specdec_core.search.results import SweepResult
from tests.commands import (
    QUICK,
    assert_refused,
    assert_shown,
    far_profile,
    plan_file,
    printed,
    prompts_file,
    stopped,
)
from tests.jobs.conftest import record_prompts
from tests.registered import runs_in


def finished_trials(home):
    """Files of finished configurations and when they were written."""
    return {path: path.stat().st_mtime_ns for path in home.glob("sweeps/*/trials/*.json")}


@pytest.mark.long
def test_a_sweep_goes_on_after_ctrl_c_and_after_kill_9(
    command, ray_running, tiny_pair_folders, tmp_path
):
    prompts = prompts_file(tmp_path, (f"x{i} = {i}" for i in range(6)))
    search = [{"drafter": {"kind": "prompt_lookup", "max_tokens": list(range(1, 25))}}]
    plan = {**QUICK, "max_new_tokens": 48, "search": search, "finalists": 2}
    config = plan_file(tmp_path, **plan)
    home = tmp_path / "home"
    arguments = [
        *("--config", config, "--target", tiny_pair_folders["target"]),
        *("--draft", f"draft={tiny_pair_folders['draft']}", "--prompts", prompts),
    ]

    driver = ["-m", "jobs.sweep", *arguments]
    output = stopped(home, driver, lambda: len(finished_trials(home)) >= 2, signal.SIGINT)
    assert "the same command resumes" in output
    assert "Traceback" not in output
    first = finished_trials(home)

    more = len(first) + 2
    output = stopped(home, driver, lambda: len(finished_trials(home)) >= more, signal.SIGKILL)
    assert f"resuming: {len(first)} of 24 done" in output
    second = finished_trials(home)
    assert len(first) < len(second) < 24

    shown = printed(command(sweep.main, home, *arguments))
    assert f"resuming: {len(second)} of 24 done" in shown
    third = finished_trials(home)
    assert third.items() >= second.items() >= first.items()  # nothing was written again
    (folder,) = (home / "sweeps").iterdir()
    result = SweepResult.load(folder)
    assert len(result.trials) == 25
    for part in ("configuration", "accept.", "champion", "report.html", "mlflow ui"):
        assert part in shown
    assert "/#/experiments/1/runs?" in shown
    assert (folder / "report.html").stat().st_size > 100_000

    _, (parent,), nested = runs_in(home)
    assert {run.info.status for run in (parent, *nested)} == {"FINISHED"}
    assert sorted(run.data.tags["config_id"] for run in nested) == sorted(
        trial.id for trial in result.trials
    )


@pytest.mark.parametrize("job", [record, sweep])
@pytest.mark.parametrize("compiled", [False, True])
def test_forwards_are_compiled_as_the_option_or_the_file_says(
    job, compiled, command, tmp_path, monkeypatch
):
    def asked(plan, *_):
        raise UserError(f"compiled: {plan.pair.runner.compile}")

    monkeypatch.setattr(job, job.__name__.partition(".")[2], asked)
    search = [{"drafter": {"kind": "suffix"}}]
    config = plan_file(tmp_path, pair={"runner": {"compile": compiled}}, search=search)
    option = "--no-compile" if compiled else "--compile"
    for options, expected in (((), compiled), ((option,), not compiled)):
        done = command(job.main, tmp_path, "--config", config, *options)
        assert_refused(done, f"compiled: {expected}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_devices_that_the_cluster_lacks_are_one_line_before_anything_is_counted(
    command, ray_running, tiny_spec, tmp_path
):
    placement, home = tmp_path / "placement.yaml", tmp_path / "home"
    placement.write_text("device: gpu")
    prompts = {"source": str(prompts_file(tmp_path, ["def main():"]))}
    plan = {"pair": tiny_spec.model_dump(mode="json"), "prompts": prompts, "max_new_tokens": 16}
    config = plan_file(tmp_path, **QUICK, **plan, search=[{"drafter": {"kind": "pearl"}}])
    done = command(sweep.main, home, "--config", config, "--cluster", placement)
    assert_refused(done, "error: device: gpu, but the cluster has none: ")
    assert not (home / "sweeps").exists()


def test_drafts_are_named_by_the_option_or_by_their_model():
    assert parse_drafts(["org/small", "m=bundled:draft-medium", "bundled:draft-small"]) == {
        "small": "org/small",
        "m": "bundled:draft-medium",
        "draft-small": "bundled:draft-small",
    }
    with pytest.raises(UserError, match="already"):
        parse_drafts(["a/x", "b/x"])


POLICY = {"kind": "fixed", "max_tokens": [1, 2, 3, 4, 5, 6, 7, 8]}


def test_a_recorded_sweep_is_replayed_and_ends_with_the_choice_for_each_load(
    command, ray_running, tiny_pair, home
):
    prompts = prompts_file(home, (f"x{i} = {i} + " for i in range(4)))
    record_prompts(tiny_pair, prompts, home / "traces" / "some", 16)
    plan = {
        "pair": tiny_pair.spec.model_dump(mode="json"),
        "search": [{"drafter": {"kind": "draft_model", "policy": POLICY}}],
        "prompts": {"source": str(prompts)},
        "max_new_tokens": 16,
        "workload": {"clients": [1, 8]},
    }
    files = ("--config", plan_file(home, **plan), "--profile", far_profile(home, 0.02, 0.002))
    done = command(sweep.main, home, *files, "--name", "loaded")
    folder = home / "sweeps" / "loaded"
    result = SweepResult.load(folder)
    assert result.replay.configurations == 9  # and autoregressive decoding
    saved = f"saved {result.replay.n_draft:,} draft and {result.replay.n_target:,} target forwards"
    schedule = folder / "schedule.yaml"
    assert_shown(done, "replayed  9 configurations", saved, "estimated for far away", schedule)
    assert (folder / "report.html").exists()
    written = read_config(schedule)[0].configuration
    assert written.lossless
    assert drafter_at(written, 1) is not None
    simulated = pd.read_csv(folder / "simulated.csv")
    assert sorted(simulated["clients"].unique()) == [1, 8]
    assert not result.under_load.timed  # it is another machine's
