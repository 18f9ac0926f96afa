"""`specdec throughput` measures, plans, writes and logs; what it prints can be pasted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mlflow import MlflowClient

from dashboards.sections import metric_name
from jobs.throughput import main
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, load_yaml, parse
from specdec_core.cost import ForwardCost, Measurement, Profile

ROOT = Path(__file__).parents[2]


def throughput(home: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
    return subprocess.run(
        [sys.executable, "-m", "jobs.throughput", *map(str, arguments)],
        cwd=ROOT,
        env={**kept, "SPECDEC_HOME": str(home), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def constant(seconds: float, per_row: float) -> ForwardCost:
    return ForwardCost.fit(
        [
            Measurement(width=w, context=c, batch=b, seconds=seconds + per_row * w * b)
            for w in (1, 2, 5)
            for c in (8, 64)
            for b in (1, 4)
        ]
    )


def profile_of(draft: str) -> Profile:
    """Verification is free here, so a plan has to draft."""
    return Profile(
        target=constant(1e-2, 0),
        drafts={draft: constant(1e-6, 0)},
        device="cpu",
        target_dtype="float32",
        draft_dtype="float32",
    )


@pytest.mark.long
def test_it_measures_plans_writes_and_logs(
    tiny_pair_folders: dict[str, Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "sums.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"x{i} = {i} +"}) for i in range(4)))
    profile = profile_of("d")
    done = throughput(
        tmp_path,
        *("--target", tiny_pair_folders["target"], "--draft", f"d={tiny_pair_folders['draft']}"),
        *("--prompts", prompts, "--max-new-tokens", "8", "--slots", "1,2", "--lengths", "2"),
        *("--repeats", "1", "--queues", "2", "--contexts", "16,64", "--name", "here"),
        *("--profile", profile.save(tmp_path / "given.json")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in ("by batch size", "K for each batch", "Cost by context", "fastest other"):
        assert shown in done.stdout
    folder = tmp_path / "throughput" / "here"
    plan = parse(Configuration, load_yaml(folder / "plan.yaml"), "plan")
    table = pd.read_csv(folder / "throughput.csv")
    labels = ["autoregressive", plan.label, "d, K=2"]
    assert list(zip(table["slots"], table["configuration"], strict=True)) == [
        (slots, label) for slots in (1, 2) for label in labels
    ]
    assert len(pd.read_csv(folder / "runs.csv")) == len(table) * 2
    assert list(pd.read_csv(folder / "contexts.csv")["context"]) == [16, 64]
    assert "| **+1,000** |" in (folder / "throughput.md").read_text()
    assert 'data-plot="contexts"' in (folder / "throughput.html").read_text()

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    [experiment] = [e for e in client.search_experiments() if e.name != "Default"]
    [run] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, metric_name("d, K=2") + ".speedup")
    assert sorted(metric.step for metric in history) == [1, 2]
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"throughput.csv", "plan.yaml", "throughput.html", "profile.json"} <= files


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": "0"}, "--slots 0: expected positive numbers"),
        ({"contexts": "many"}, "--contexts many: expected positive numbers"),
        ({"target": "x"}, "no draft model"),
        ({"name": "../up"}, "expected a folder's name"),
        ({"config": Path("x.yaml"), "target": "x"}, "--config names the pair"),
        ({"config": Path("x.yaml"), "max_length": 9}, "--config names the pair"),
        ({"max_length": 1}, r"runner: max_length: .* \(got 1\)"),
        ({"profile": Path("nowhere.json")}, "nowhere.json: no such profile"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("specdec_core.models.pair.load_pair", loaded)
    with pytest.raises(UserError, match=message):
        main(**options)


def test_a_profile_without_a_draft_is_said_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_core.models.pair.load_pair", None)
    with pytest.raises(UserError, match=r"no forward time of draft '.*' \(it has: other\)"):
        main(profile=profile_of("other").save(tmp_path / "other.json"))
