"""`specdec capacity` finds replicas for a load, and says what no number of them can do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from jobs import capacity
from specdec_core.cost import ForwardCost, Measurement, Profile
from specdec_core.models.pair import Pair
from tests.commands import Command, prompts_file
from tests.jobs.conftest import record_prompts

TEXTS = [*(f"x{i} = {i} + " for i in range(3)), "y = 2 + " * 15]
FIXED = {"kind": "draft_model", "draft": "draft", "policy": {"kind": "fixed", "max_tokens": 3}}

TREE = {"kind": "dynamic_tree", "policy": {"kind": "fixed", "max_tokens": 3}}


@pytest.fixture(scope="module")
def home(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a recording, a configuration, a profile and a hardware file."""
    home = tmp_path_factory.mktemp("home")
    prompts = prompts_file(home, TEXTS, "texts")
    record_prompts(tiny_pair, prompts, home / "traces" / "some", 16)
    config = {"pair": tiny_pair.spec.model_dump(), "configuration": {"drafter": FIXED}}
    (home / "c.yaml").write_text(json.dumps(config))
    forwards = [
        Measurement(width=width, context=64, batch=batch, seconds=0.01 + 0.001 * batch)
        for width in (1, 4)
        for batch in (1, 8)
    ]
    cost, types = ForwardCost.fit(forwards), {"target_dtype": "float32", "draft_dtype": "float32"}
    profile = Profile(target=cost, drafts={"draft": cost}, device="far away", **types)
    profile.save(home / "profile.json")
    hardware = {"name": "far away", "target": 0.1, "drafts": {"*": 0.01}}
    (home / "h.yaml").write_text(json.dumps(hardware))
    return home


def given(home: Path, hardware: str | None = None) -> list[object]:
    times = ["--hardware", home / hardware] if hardware else ["--profile", home / "profile.json"]
    files = ["--config", home / "c.yaml", *times]
    return ["--traces", "some", "--seconds", 2, *files]


def test_replicas_for_a_rate(command: Command, home: Path) -> None:
    done = command(
        capacity.main, home, *given(home), "--rate", 60, "--slo", "ttft=1", "--name", "rate"
    )
    assert done.returncode == 0, done.stderr
    assert "60.0 requests a second" in done.stdout
    assert "median, 95th and 99th percentile" in done.stdout
    tried = pd.read_csv(home / "capacity" / "rate" / "tried.csv")
    assert {"replicas", "rate", "good_share", "ttft_p95", "router_busy"} <= set(tried.columns)
    report = (home / "capacity" / "rate" / "capacity.md").read_text()
    assert re.search(r"Simulated [\d,]+ times as fast as replicas decode", report)
    assert tried["good_share"].max() >= 0.95 > tried["good_share"].min()


def test_what_cannot_be_replayed_is_decoded_live_and_said(
    command: Command, home: Path, tiny_pair: Pair
) -> None:
    tree = {"pair": tiny_pair.spec.model_dump(), "configuration": {"drafter": TREE}}
    (home / "tree.yaml").write_text(json.dumps(tree))
    arguments = [*given(home), "--config", home / "tree.yaml", "--slo", "ttft=1", "--rate", 20]
    done = command(capacity.main, home, *arguments, "--name", "tree")
    assert done.returncode == 0, done.stderr
    assert "decoded live, not replayed" in " ".join(done.stdout.split())


def test_a_policy_that_asks_for_a_cost_is_replayed_at_that_of_the_times(
    command: Command, home: Path, tiny_pair: Pair
) -> None:
    drafter = {"kind": "draft_model", "policy": {"kind": "break_even"}}
    even = {"pair": tiny_pair.spec.model_dump(), "configuration": {"drafter": drafter}}
    (home / "even.yaml").write_text(json.dumps(even))
    arguments = [*given(home), "--config", home / "even.yaml", "--slo", "ttft=1", "--rate", 20]
    done = command(capacity.main, home, *arguments, "--name", "even")
    assert done.returncode == 0, done.stderr
    assert "decoded live" not in done.stdout
    assert re.search(r"break-even [0-9.]+", done.stdout)


def test_a_draft_that_is_not_named_is_the_configurations_own(
    command: Command, home: Path, tiny_pair: Pair
) -> None:
    """Not the recording's first."""
    spec = tiny_pair.spec.model_dump()
    drafts = {"another": spec["drafts"]["draft"], **spec["drafts"]}
    drafter = {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 3}}
    other = {"pair": {**spec, "drafts": drafts}, "configuration": {"drafter": drafter}}
    (home / "other.yaml").write_text(json.dumps(other))
    arguments = [*given(home), "--config", home / "other.yaml", "--slo", "ttft=1", "--rate", 20]
    done = command(capacity.main, home, *arguments)
    assert done.returncode == 2
    assert "no draft 'another'" in " ".join(done.stderr.split())


def test_without_a_name_the_pairs_latest_recording_is_simulated(
    command: Command, home: Path, tmp_path: Path
) -> None:
    arguments = ["--config", home / "c.yaml", "--profile", home / "profile.json"]
    arguments += ["--seconds", 2, "--rate", 60, "--slo", "ttft=1"]
    done = command(capacity.main, home, *arguments)
    assert done.returncode == 0, done.stderr
    assert "prompts of some: " in " ".join(done.stdout.split())
    nothing = command(capacity.main, tmp_path, *arguments)
    assert nothing.returncode == 2
    assert "no recording of" in nothing.stderr
    assert "`specdec record` makes one" in " ".join(nothing.stderr.split())


def test_the_rate_of_replicas_under_another_machines_times(command: Command, home: Path) -> None:
    arguments = [*given(home, "h.yaml"), "--replicas", "1,2", "--slo", "latency=60"]
    done = command(capacity.main, home, *arguments, "--router-ms", 1)
    assert done.returncode == 0, done.stderr
    assert "1 replica: " in done.stdout
    assert "2 replicas: " in done.stdout


def test_replicas_for_a_trace(command: Command, home: Path) -> None:
    lines = [{"arrival": n / 50, "prompt_tokens": 40, "output_tokens": 30} for n in range(100)]
    (home / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = command(
        capacity.main, home, *given(home), "--trace", home / "t.jsonl", "--slo", "ttft=1"
    )
    assert done.returncode == 0, done.stderr
    assert "100 requests of" in done.stdout
    assert "50.5 requests a second" in done.stdout


def test_a_traces_own_prompts_are_as_long_in_the_simulation(command: Command, home: Path) -> None:
    """In tokens of the target: longer than any that was recorded."""
    line = {"arrival": 0, "prompt": "y = 2 + " * 60, "max_new_tokens": 4}
    (home / "long.jsonl").write_text(json.dumps(line))
    arguments = [*given(home), "--trace", home / "long.jsonl", "--slo", "latency=60"]
    short = command(capacity.main, home, *arguments, "--cache-tokens", 256)
    assert short.returncode == 2
    assert "--cache-tokens 256: too few for the longest prompt" in short.stderr
    done = command(capacity.main, home, *arguments)
    assert done.returncode == 0, done.stderr
    assert "tokens and answers of 4, on average" in " ".join(done.stdout.split())


def test_limits_out_of_reach_are_one_clear_line(command: Command, home: Path) -> None:
    done = command(capacity.main, home, *given(home), "--rate", 5, "--slo", "ttft=0.001")
    assert done.returncode == 0, done.stderr
    lines = " ".join(done.stdout.split())
    assert "ttft ≤ 0.001 s cannot be kept for 95% of the requests with any number of" in lines
    assert "alone on a replica, 0% keep it (95th percentile: ttft" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo", "ttft=1"], "give --rate or --trace, to find how many replicas it needs"),
        (["--slo", "fast", "--rate", 1], "--slo fast: expected limits in seconds"),
        (["--slo", "ttft=1", "--rate", 0], "--rate 0: expected requests a second"),
        (["--slo", "ttft=1", "--rate", 1, "--share", 2], "--share 2: expected a share"),
        (["--slo", "ttft=1", "--rate", 1, "--router", "x"], "--router x: expected two_choices or"),
        (
            ["--slo", "ttft=1", "--rate", 1, "--cache-tokens", 130],
            "--cache-tokens 130: too few for the longest prompt",
        ),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[object], message: str, command: Command, home: Path
) -> None:
    # What is refused is refused before anything is simulated.
    done = command(capacity.main, home, *given(home), *arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
