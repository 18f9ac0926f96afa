"""Tune counts every configuration once, in as many processes as there is room for."""

import os
import re
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime

import pandas as pd
import pytest
import ray
from ray import tune
from ray.cloudpickle import register_pickle_by_value

from cluster.sweep import counting
from cluster.sweep.counting import count_all
from cluster.sweep.state import SweepState
from cluster.sweep.trial import Counted, CountTrial, TrialTask, group, grouped
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.engine import Request
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.search.folder import SweepFolder
from specdec_core.search.observer import SweepObserver
from specdec_core.search.plan import Plan
from specdec_core.search.results import SweepResult, Trial
from tests.observers import HeardSweep

PLAN = Plan.model_validate(
    {
        "search": [{"drafter": {"kind": "prompt_lookup", "max_tokens": list(range(1, 13))}}],
        "profile": {"device": "far away", "target": 0.1, "drafts": {"*": 0.01}},
    }
).resolve()
COUNT = 13  # and autoregressive decoding
DEADLY = 7  # the number of candidates with which a process ends


@dataclass(frozen=True)
class IdleTask:
    """The part of a task that :func:`count_all` uses, and the seconds that a trial sleeps."""

    seconds: float
    requests: range = range(4)
    chunk: int = 4
    replay: None = None

    def replays(self, configuration):
        return False


class IdleTrial(tune.Trainable):
    """Sleeps for each configuration, and answers as :class:`cluster.sweep.trial.CountTrial`
    without loading a model."""

    def setup(self, config, task):
        self.task = task
        self.reset_config(config)

    def reset_config(self, new_config):
        self.configurations = grouped(new_config)
        return True

    def step(self):
        configuration = self.configurations.pop()
        time.sleep(self.task.seconds)
        trial = Trial(
            configuration=configuration,
            counts={"n": 1},
            metrics={"estimated_speedup": 1.0},
        )
        rounds = pd.DataFrame({"config_id": ["idle"], "round": [0]}).to_parquet()
        return {
            "estimated_speedup": 1.0,
            "prompts": len(self.task.requests),
            "counted": Counted([trial], rounds=rounds),
            "done": not self.configurations,
        }


class PidTrial(IdleTrial):
    """Leaves the number of its process in its rounds."""

    def step(self):
        result = super().step()
        result["counted"].rounds = pd.DataFrame({"pid": [os.getpid()]}).to_parquet()
        return result


class DeadlyTrial(IdleTrial):
    """Its process ends where one configuration is among those that it has to count."""

    def step(self):
        if any(getattr(c.drafter, "max_tokens", 0) == DEADLY for c in self.configurations):
            os._exit(1)
        return super().step()


class FailingTrial(IdleTrial):
    """Counts no configuration."""

    def step(self):
        result = super().step()
        [trial] = result["counted"].trials
        result["counted"] = Counted(failed=[(trial.configuration, "too long")])
        return result


class RefusingTrial(IdleTrial):
    """Is on a node that counts nothing."""

    def step(self):
        return super().step() | {"counted": Counted(refused="target: other weights"), "done": False}


def count(folder, tell, trial=IdleTrial):
    """Count what `folder` does not hold, with trials that take next to no time."""
    own = SweepFolder(folder / "sweeps" / "idle")
    result = SweepResult(
        name="idle",
        started=datetime.now(UTC),
        pair=PLAN.pair,
        prompts=PromptSet(source="none", count=1, digest="0"),
        max_new_tokens=1,
        profile=PLAN.profile.of(PLAN.pair.drafts),
        trials=own.trials(),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "CountTrial", trial)
        count_all(SweepState(PLAN, result, own, tell), IdleTask(0.1), {"CPU": 1})
    return result


@pytest.mark.long
def test_every_process_counts(ray_running, tmp_path):
    register_pickle_by_value(sys.modules[__name__])  # else processes import what this file does
    result = count(tmp_path, SweepObserver(), PidTrial)
    assert len({trial.id for trial in result.trials}) == len(result.trials) == COUNT
    found = [pd.read_parquet(file) for file in tmp_path.glob("sweeps/idle/trials/*.parquet")]
    assert len(found) == COUNT
    assert pd.concat(found)["pid"].nunique() == ray.cluster_resources()["CPU"]


@pytest.mark.long
def test_a_configuration_that_ends_its_process_takes_no_other_with_it(ray_running, tmp_path):
    register_pickle_by_value(sys.modules[__name__])  # else processes import what this file does
    heard = HeardSweep()
    result = count(tmp_path, heard, DeadlyTrial)
    lengths = [getattr(t.configuration.drafter, "max_tokens", 0) for t in result.trials]
    assert sorted(lengths) == [n for n in range(COUNT) if n != DEADLY]
    [line] = heard.warnings
    assert f"/{DEADLY} failed: " in line


def test_nothing_is_left_out_where_a_node_has_yet_to_start(ray_running, tmp_path, monkeypatch):
    register_pickle_by_value(sys.modules[__name__])  # else processes import what this file does
    monkeypatch.setattr("cluster.sweep.counting.room", lambda needs: 0)  # it is there by then
    assert len(count(tmp_path, SweepObserver()).trials) == COUNT


def test_a_search_of_which_every_configuration_fails_ends_in_one_line(ray_running, tmp_path):
    register_pickle_by_value(sys.modules[__name__])  # else processes import what this file does
    heard = HeardSweep()
    with pytest.raises(UserError, match="no configuration could be counted: too long"):
        count(tmp_path, heard, FailingTrial)
    assert len(heard.warnings) == COUNT


def test_a_node_with_other_weights_ends_counting_in_one_line(ray_running, tmp_path):
    register_pickle_by_value(sys.modules[__name__])  # else processes import what this file does
    heard = HeardSweep()
    with pytest.raises(UserError, match=r"^target: other weights$"):
        count(tmp_path, heard, RefusingTrial)
    assert heard.warnings == []  # not one for each configuration


def test_a_trial_refuses_models_with_other_weights_than_the_sweeps(ray_running, tiny_pair):
    prompt = tuple(tiny_pair.tokenizer("def main():")["input_ids"])
    profile = PLAN.profile.of(tiny_pair.spec.drafts)
    shared = tiny_pair.spec, profile, (Request("a", prompt, 4),), 1
    asked = {"configurations": group([AUTOREGRESSIVE])}
    for weights, refused in ((tiny_pair.fingerprints, False), ({"target": "0" * 16}, True)):
        task = TrialTask(*shared, weights=weights)
        trial = tune.with_parameters(CountTrial, task=task)(asked)
        counted = trial.train()["counted"]
        trial.stop()
        assert len(counted.trials) == (not refused)
        assert counted.failed == []
        if refused:
            found = r"/target: other weights on the cluster's node [0-9.]+ than in the sweep \("
            assert re.search(found, counted.refused)


@pytest.mark.long
def test_a_full_disk_ends_counting_in_one_line_and_with_room_it_goes_on(ray_running, small_disk):
    class Filler(SweepObserver):
        def __init__(self, after):
            self.after, self.finished = after, 0

        def trial_finished(self, trial):
            self.finished += 1
            if self.finished == self.after:
                small_disk.fill()

    with pytest.raises(UserError, match=rf"trials/\w+\.parquet: .* {small_disk.reason}; make room"):
        count(small_disk.folder, Filler(5))
    small_disk.make_room()
    folder = SweepFolder(small_disk.folder / "sweeps" / "idle")
    kept = {file: file.stat().st_mtime_ns for file in folder.path.glob("trials/*.json")}
    assert len(kept) == len(folder.trials()) == 4
    again = Filler(COUNT + 1)
    result = count(small_disk.folder, again)
    assert again.finished == COUNT - 4
    assert len({trial.id for trial in result.trials}) == len(result.trials) == COUNT
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert not list(folder.path.glob("trials/.*"))
