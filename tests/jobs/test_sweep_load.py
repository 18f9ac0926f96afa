"""A sweep with a workload chooses for each load, and writes a schedule that can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from jobs import sweep
from jobs.choice import read_config
from specdec_core.models.pair import Pair
from specdec_core.search.load.schedule import drafter_at
from specdec_core.search.results import SweepResult
from tests.commands import Command
from tests.jobs.conftest import record_prompts

FIXED = {"drafter": {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": [2, 5]}}}


def test_a_sweep_with_a_workload_ends_with_the_choice_for_each_load(
    command: Command, tiny_pair: Pair, tmp_path: Path
) -> None:
    prompts = tmp_path / "sums.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"x{i} = {i} + "}) for i in range(4)))
    record_prompts(tiny_pair, prompts, tmp_path / "traces" / "some", 16)
    plan = {
        "pair": tiny_pair.spec.model_dump(),
        "search": [FIXED],
        "prompts": {"source": str(prompts)},
        "max_new_tokens": 16,
        "workload": {"clients": [1, 8]},
    }
    (tmp_path / "sweep.yaml").write_text(json.dumps(plan))
    (tmp_path / "h.yaml").write_text('{name: far away, target: 0.02, drafts: {"*": 0.002}}')
    arguments = ["--config", tmp_path / "sweep.yaml", "--traces", "some", "--name", "loaded"]
    done = command(sweep.main, tmp_path, *arguments, "--hardware", tmp_path / "h.yaml")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "sweeps" / "loaded"
    schedule = folder / "schedule.yaml"
    assert str(schedule) in done.stdout
    written = read_config(schedule)[0].configuration
    assert written.lossless
    assert drafter_at(written, 1) is not None
    simulated = pd.read_csv(folder / "simulated.csv")
    assert sorted(simulated["clients"].unique()) == [1, 8]
    assert not SweepResult.load(folder).under_load.timed  # it is another machine's
