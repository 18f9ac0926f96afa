"""`specdec schedule` writes a schedule that can be read, chosen among all of a sweep file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from jobs import generate, schedule, sweep
from jobs.choice import read_config
from specdec_core.config import Sampling
from specdec_core.cost.steps import ForwardTerms, StepTimes
from specdec_core.models.pair import Pair
from specdec_core.search.load.schedule import drafter_at
from specdec_core.search.results import SweepResult
from tests.commands import Command
from tests.jobs.conftest import record_prompts

FIXED = {"drafter": {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": [2, 5]}}}
TREE = {"drafter": {"kind": "dynamic_tree"}}
LOOKAHEAD = {"drafter": {"kind": "lookahead"}}  # no recording tells what it does


@pytest.fixture(scope="module")
def home(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a recording, a sweep file and step times."""
    home = tmp_path_factory.mktemp("home")
    prompts = home / "texts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"x{i} = {i} + "}) for i in range(4)))
    record_prompts(tiny_pair, prompts, home / "traces" / "some", 16)
    plan = {
        "pair": tiny_pair.spec.model_dump(),
        "search": [FIXED, LOOKAHEAD],
        "prompts": {"source": str(prompts)},
        "max_new_tokens": 16,
        "workload": {"clients": [1, 8]},
        "live": {"requests": 6, "repeats": 2},
    }
    (home / "sweep.yaml").write_text(json.dumps(plan))
    (home / "none.yaml").write_text(json.dumps({**plan, "search": [LOOKAHEAD]}))
    target = ForwardTerms(fixed=0.01, per_token_beyond=0.003, knee=12)
    StepTimes(target=target, drafts={"draft": ForwardTerms(fixed=0.001)}).save(home / "s.yaml")
    return home


def test_a_schedule_is_written(command: Command, home: Path) -> None:
    arguments = ["--traces", "some", "--config", home / "sweep.yaml", "--hardware", home / "s.yaml"]
    done = command(schedule.main, home, *arguments, "--decode")
    assert done.returncode == 0, done.stderr
    assert "3 configurations of" in done.stdout
    assert "1 of them decoded live" in " ".join(done.stdout.split())
    path = home / "schedules" / "some" / "schedule.yaml"
    assert f"serve --config {path} --slots 8\n" in done.stdout  # one for every client
    written, _ = read_config(path)
    assert drafter_at(written.configuration, 1) is not None
    assert drafter_at(written.configuration, 8) is None
    assert written.configuration.sentence in " ".join(done.stdout.split())
    report = path.with_suffix(".md").read_text()
    assert re.search(r"configurations were simulated, [\d,]+ times as fast as an engine", report)
    prompt = ["x1 = 1 + ", "--max-new-tokens", "8"]
    decoded = command(generate.main, home, "--config", path, *prompt)
    assert decoded.returncode == 0, decoded.stderr
    simulated = pd.read_csv(home / "schedules" / "some" / "simulated.csv")
    assert sorted(simulated["clients"].unique()) == [1, 8]  # the workload's
    assert simulated.groupby("decoded_live")["config_id"].nunique()[True] == 1
    assert len(list((home / "traces" / "some" / "decoded").iterdir())) == 1
    without = command(schedule.main, home, *arguments, "--name", "replayed")
    assert without.returncode == 0, without.stderr
    assert "2 configurations of" in without.stdout


def test_goodput_may_choose(command: Command, home: Path) -> None:
    arguments = ["--traces", "some", "--config", home / "sweep.yaml", "--hardware", home / "s.yaml"]
    done = command(schedule.main, home, *arguments, "--slo", "tpot=1", "--clients", "1,2")
    assert done.returncode == 0, done.stderr
    assert "goodput with tpot ≤ 1 s" in " ".join(done.stdout.split())


def test_finalists_answer_the_workload_live_and_the_best_measured_is_chosen(
    command: Command, home: Path
) -> None:
    """On this machine: the step times only say who is timed."""
    (home / "steps.json").write_text((home / "s.yaml").read_text())
    arguments = ["--traces", "some", "--config", home / "sweep.yaml", "--name", "live"]
    done = command(schedule.main, home, *arguments)
    assert done.returncode == 0, done.stderr
    folder = home / "schedules" / "live"
    rows = pd.read_csv(folder / "loads.csv")
    assert {"1 client", "8 clients"} == set(rows["load"])
    timed = rows.groupby("load")["configuration"].agg(set)
    assert {"autoregressive"} < timed["1 client"]
    assert {"autoregressive"} < timed["8 clients"]  # though no draft comes near it by simulation
    for _, at_load in rows.groupby("load"):
        assert at_load["chosen"].sum() == 1
        assert (
            at_load[["value", "value_simulated", "speedup", "low", "high"]].notna().all(axis=None)
        )
    shown = " ".join(done.stdout.split())
    assert "costs at most" in shown
    assert "The simulation is off by" in shown
    assert 'data-plot="simulation"' in (folder / "schedule.html").read_text()
    decoded = command(
        generate.main, home, "--config", folder / "schedule.yaml", "x1 =", "--max-new-tokens", "8"
    )
    assert decoded.returncode == 0, decoded.stderr


def test_nothing_to_replay_is_one_line(command: Command, home: Path) -> None:
    arguments = ["--traces", "some", "--config", home / "none.yaml", "--no-decode"]
    arguments += ["--hardware", home / "s.yaml"]
    done = command(schedule.main, home, *arguments)
    assert done.returncode == 2
    assert "no configuration whose rounds" in done.stderr


@pytest.mark.long
def test_a_sweep_with_a_workload_ends_with_the_choice_for_each_load(
    command: Command, home: Path
) -> None:
    (home / "h.yaml").write_text('{name: far away, target: 0.02, drafts: {"*": 0.002}}')
    arguments = ["--config", home / "sweep.yaml", "--traces", "some", "--hardware", home / "h.yaml"]
    done = command(sweep.main, home, *arguments, "--name", "loaded")
    assert done.returncode == 0, done.stderr
    folder = home / "sweeps" / "loaded"
    assert read_config(folder / "schedule.yaml")[0].configuration.lossless
    simulated = pd.read_csv(folder / "simulated.csv")
    assert sorted(simulated["clients"].unique()) == [1, 8]
    assert not SweepResult.load(folder).under_load.timed  # it is another machine's


def test_with_rejection_sampling_chains_are_drawn_and_the_rest_is_decoded(
    command: Command, home: Path, tiny_pair: Pair
) -> None:
    drawn = Sampling(temperature=1.0)
    record_prompts(tiny_pair, home / "texts.jsonl", home / "traces" / "drawn", 16, drawn)
    plan = json.loads((home / "sweep.yaml").read_text())
    plan |= {"search": [FIXED, TREE], "sampling": drawn.model_dump()}
    (home / "drawn.yaml").write_text(json.dumps(plan))
    arguments = ["--traces", "drawn", "--config", home / "drawn.yaml"]
    arguments += ["--hardware", home / "s.yaml", "--decode"]
    done = command(schedule.main, home, *arguments)
    assert done.returncode == 0, done.stderr
    assert "3 configurations of" in done.stdout
    assert len(list((home / "traces" / "drawn" / "decoded").iterdir())) == 1
