"""`specdec capacity` finds replicas for a load, and says what no number of them can do."""

import json
import re
from types import SimpleNamespace

import pandas as pd
import pytest
from mlflow.exceptions import MlflowException

from dashboards.reports.capacity import found_line
from jobs import capacity
from specdec_core.cost import ForwardCost, Measurement
from specdec_core.search.load.workload import Slo
from tests.commands import assert_refused, config_file, far_profile, printed, prompts_file
from tests.jobs.conftest import record_prompts
from tests.specdec_core.cost.examples import profile_of
from tests.specdec_core.kinds import chain

TEXTS = [*(f"x{i} = {i} + " for i in range(3)), "y = 2 + " * 15]
UNNAMED = chain(max_tokens=3)
FIXED = UNNAMED | {"draft": "draft"}
TREE = UNNAMED | {"kind": "dynamic_tree"}


@pytest.fixture(scope="module")
def home(tiny_pair, tmp_path_factory):
    """A workspace with a recording, a configuration and a profile."""
    home = tmp_path_factory.mktemp("home")
    prompts = prompts_file(home, TEXTS, "texts")
    record_prompts(tiny_pair, prompts, home / "traces" / "some", 16)
    config_file(home, tiny_pair.spec, FIXED)
    forwards = [
        Measurement(width=width, context=64, batch=batch, seconds=0.01 + 0.001 * batch)
        for width in (1, 4)
        for batch in (1, 8)
    ]
    cost = ForwardCost.fit(forwards)
    profile_of(cost, {"draft": cost}, device="far away").save(home / "profile.json")
    return home


@pytest.fixture
def simulated(command, home):
    """Run the command with these options after those for the configuration and the profile."""
    files = ("--config", home / "config.yaml", "--profile", home / "profile.json")

    def simulate(*options):
        name = f"result-{len(list(home.glob('capacity/*')))}"
        given = ("--seconds", 2, "--name", name, *options)
        return command(capacity.main, home, *files, *given)

    return simulate


LOAD = ("--traces", "some", "--slo", "ttft=1", "--rate", 20)


def test_replicas_for_a_rate(simulated, home):
    shown = printed(simulated(*LOAD, "--rate", 60, "--name", "rate"))
    assert "60.0 requests a second" in shown
    assert "median, 95th and 99th percentile" in shown
    tried = pd.read_csv(home / "capacity" / "rate" / "tried.csv")
    assert {"replicas", "rate", "good_share", "ttft_p95"} <= set(tried.columns)
    report = (home / "capacity" / "rate" / "capacity.md").read_text()
    assert re.search(r"Simulated [\d,]+ times as fast as replicas decode", report)
    assert tried["good_share"].max() >= 0.95 > tried["good_share"].min()


def test_an_earlier_report_is_not_overwritten(simulated, home):
    load = ("--traces", "some", "--slo", "ttft=0.001", "--rate", 5, "--name", "kept")
    printed(simulated(*load))
    report = (home / "capacity" / "kept" / "capacity.md").read_text()
    assert_refused(simulated(*load, "--slo", "ttft=1"), "kept exists: give another --name")
    assert (home / "capacity" / "kept" / "capacity.md").read_text() == report


def test_what_cannot_be_replayed_is_decoded_live_and_said(simulated, home, tiny_spec):
    tree = config_file(home, tiny_spec, TREE, "tree")
    assert "decoded live, not replayed" in printed(simulated(*LOAD, "--config", tree))


def test_a_policy_that_asks_for_a_cost_is_replayed_at_that_of_the_times(simulated, home, tiny_spec):
    even = {"kind": "draft_model", "policy": {"kind": "break_even"}}
    shown = printed(simulated(*LOAD, "--config", config_file(home, tiny_spec, even, "even")))
    assert "decoded live" not in shown
    assert re.search(r"break-even [0-9.]+", shown)


def test_a_draft_that_is_not_named_is_the_configurations_own(simulated, home, tiny_spec):
    """Not the recording's first."""
    drafts = {"another": tiny_spec.drafts["draft"], **tiny_spec.drafts}
    other = config_file(home, tiny_spec.model_copy(update={"drafts": drafts}), UNNAMED, "other")
    assert_refused(simulated(*LOAD, "--config", other), "no draft 'another'")


def test_without_a_name_the_pairs_latest_recording_is_simulated(simulated, command, home, tmp_path):
    load = ("--rate", 60, "--slo", "ttft=1")
    assert "prompts of some: " in printed(simulated(*load))
    files = ("--config", home / "config.yaml", "--profile", home / "profile.json")
    nothing = command(capacity.main, tmp_path, *files, *load)
    assert_refused(nothing, "no recording of .*`specdec record` makes one")


def test_the_rate_of_replicas_under_another_machines_times(command, home, tmp_path):
    files = ("--config", home / "config.yaml", "--profile", far_profile(tmp_path, 0.1, 0.01))
    load = ("--traces", "some", "--replicas", "1,2", "--slo", "latency=60", "--seconds", 2)
    shown = printed(command(capacity.main, home, *files, *load))
    assert "1 replica: " in shown
    assert "2 replicas: " in shown
    assert list(home.glob("capacity/some-????????-??????/capacity.md"))  # without --name


def trace_file(path, arrivals):
    lines = [{"arrival": at, "prompt_tokens": 40, "output_tokens": 30} for at in arrivals]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_replicas_for_a_trace(simulated, home):
    trace = trace_file(home / "t.jsonl", [60 + n / 50 for n in range(100)])
    shown = printed(simulated("--traces", "some", "--trace", trace, "--slo", "ttft=1"))
    assert "100 requests of" in shown
    assert "50.5 requests a second" in shown  # from the first arrival on


def test_a_trace_whose_requests_all_come_at_the_same_time_has_no_rate(simulated, home):
    trace = trace_file(home / "once.jsonl", [3, 3, 3])
    refused = simulated("--traces", "some", "--trace", trace, "--slo", "ttft=1")
    assert_refused(refused, r"--trace .*once.jsonl: no rate: every request arrives at 3 s; ")


def test_forwards_of_one_row_are_refused_where_requests_are_decoded_together(home, command):
    alone = [Measurement(width=w, context=64, batch=1, seconds=0.01) for w in (1, 4)]
    cost = ForwardCost.fit(alone)
    file = profile_of(cost, {"draft": cost}, device="far away").save(home / "alone.json")
    options = ("--config", home / "config.yaml", "--profile", file, *LOAD, "--name", "alone")
    assert_refused(command(capacity.main, home, *options), "forwards of 1 row(s) alone do not say")
    printed(command(capacity.main, home, *options, "--slots", 1, "--seconds", 1))


def test_a_traces_own_prompts_are_as_long_in_the_simulation(simulated, home):
    """In tokens of the target: longer than any that was recorded."""
    lines = [{"arrival": at, "prompt": "y = 2 + " * 60, "max_new_tokens": 4} for at in (0, 1)]
    (home / "long.jsonl").write_text("\n".join(map(json.dumps, lines)))
    trace = ("--traces", "some", "--trace", home / "long.jsonl", "--slo", "latency=60")
    short = simulated(*trace, "--cache-tokens", 256)
    assert_refused(short, "--cache-tokens 256: too few for the longest prompt")
    assert "tokens and answers of 4, on average" in printed(simulated(*trace))


def test_a_report_outlives_a_store_that_is_gone(simulated, home, monkeypatch):
    def gone(*_, **__):
        raise MlflowException("gone")

    monkeypatch.setattr("dashboards.outputs.mlflow_runs.log_run", gone)
    assert_refused(simulated(*LOAD, "--name", "outlives"), "it is no run in MLflow")
    assert (home / "capacity" / "outlives" / "capacity.html").exists()


def test_what_one_request_keeps_and_no_load_does_is_not_said_to_be_impossible():
    good = SimpleNamespace(good_share=0.97, ttft=(), value=lambda name, percentile: 0.1)
    found = {"chosen": None, "possible": True, "share": 0.95}
    alone = SimpleNamespace(measures=good)
    line = found_line(SimpleNamespace(slo=Slo(ttft=0.2), alone=alone, **found))
    assert "alone on a replica, 97% keep it" in line
    assert "cannot be kept" not in line


def test_limits_out_of_reach_are_one_clear_line(simulated):
    lines = printed(simulated("--traces", "some", "--rate", 5, "--slo", "ttft=0.001"))
    assert "ttft ≤ 0.001 s cannot be kept for 95% of the requests with any number of" in lines
    assert "alone on a replica, 0% keep it (95th percentile: ttft" in lines
