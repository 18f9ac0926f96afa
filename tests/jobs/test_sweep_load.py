"""A sweep with a workload chooses for each load, and writes a schedule that can be read."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from jobs import sweep
from jobs.choice import read_config
from specdec_core.models.pair import Pair
from specdec_core.search.load.schedule import drafter_at
from specdec_core.search.results import SweepResult
from tests.commands import Command, hardware_file, plan_file, prompts_file
from tests.jobs.conftest import record_prompts

POLICY = {"kind": "fixed", "max_tokens": [1, 2, 3, 4, 5, 6, 7, 8]}


def test_a_recorded_sweep_is_replayed_and_ends_with_the_choice_for_each_load(
    command: Command, ray_running: None, tiny_pair: Pair, home: Path
) -> None:
    prompts = prompts_file(home, (f"x{i} = {i} + " for i in range(4)))
    record_prompts(tiny_pair, prompts, home / "traces" / "some", 16)
    plan = {
        "pair": tiny_pair.spec.model_dump(mode="json"),
        "search": [{"drafter": {"kind": "draft_model", "policy": POLICY}}],
        "prompts": {"source": str(prompts)},
        "max_new_tokens": 16,
        "workload": {"clients": [1, 8]},
    }
    files = ("--config", plan_file(home, **plan), "--hardware", hardware_file(home, 0.02, 0.002))
    done = command(sweep.main, home, *files, "--name", "loaded")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = home / "sweeps" / "loaded"
    result = SweepResult.load(folder)
    assert result.replay.configurations == 9  # and autoregressive decoding
    saved = f"saved {result.replay.n_draft:,} draft and {result.replay.n_target:,} target forwards"
    schedule = folder / "schedule.yaml"
    for shown in ("replayed  9 configurations", saved, "estimated for far away", str(schedule)):
        assert shown in done.stdout
    assert (folder / "report.html").exists()
    written = read_config(schedule)[0].configuration
    assert written.lossless
    assert drafter_at(written, 1) is not None
    simulated = pd.read_csv(folder / "simulated.csv")
    assert sorted(simulated["clients"].unique()) == [1, 8]
    assert not result.under_load.timed  # it is another machine's
