"""`specdec bench serve` starts servers, puts them under load, writes and logs."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from jobs import bench_serve
from specdec_core.config import PairSpec
from specdec_core.evidence.load.result import LoadResult
from specdec_core.search.load.workload import Load
from tests.commands import Command, assert_refused

pytestmark = pytest.mark.usefixtures("ray_running")  # with Ray's other tests: its servers start Ray


@pytest.fixture
def arguments(tiny_spec: PairSpec, tmp_path: Path) -> list[str]:
    """The tiny pair, no rows but autoregressive decoding, and prompts."""
    rows, prompts = tmp_path / "rows.yaml", tmp_path / "sums.jsonl"
    rows.write_text("rows: []\n")
    prompts.write_text("\n".join(json.dumps({"prompt": f"x{n} = {n} +"}) for n in range(6)))
    drafts = [f"--draft={name}={folder}" for name, folder in tiny_spec.drafts.items()]
    pair = [f"--target={tiny_spec.target}", *drafts, "--dtype=float32"]
    return [*pair, f"--rows={rows}", f"--prompts={prompts}", "--max-new-tokens=6"]


@pytest.mark.long
def test_a_server_is_measured_over_http(
    command: Command, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_core.servers.vllm.process.VENV", tmp_path / "nowhere")
    load = ("--rate=20", "--slo=ttft=60", "--requests=4", "--slots=2", "--repeats=1", "--name=mine")
    done = command(bench_serve.main, tmp_path / "home", *arguments, *load)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("without vllm: ") == 1
    assert "make bench-peers" in done.stdout
    for shown in ("Goodput and latency", "TTFT p95", "TPOT ms", "autoregressive", "report  "):
        assert shown in done.stdout
    folder = tmp_path / "home" / "bench" / "mine"
    result = LoadResult.load(folder)
    assert result.loads == [Load(rate=20, requests=4)]
    (row,), (load,) = result.rows, result.loads
    assert (row.autoregressive, row.errors(load)) == (True, 0)
    requests = pd.read_csv(folder / "requests.csv")
    assert list(requests["tokens"]) == [6] * 4
    assert (requests["first"] >= requests["sent"]).all()
    assert (folder / "report.html").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]  # no parts are left


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--clients=0"], "--clients 0: expected positive numbers as 1,2,4"),
        (["--clients=4,4"], "--clients: a number of clients is given twice"),
        (["--requests=4"], "--clients or --rate says the load"),
        (
            ["--rate=20", "--requests=4", "--slots=2", "--only=x"],
            "--only x: no server's name contains it",
        ),
        (["--rate=0"], "--rate 0: expected requests a second as 2,4.5"),
        (["--rate=2,2"], "--rate: a rate is given twice"),
        (["--clients=1", "--seed=1"], "--seed needs --rate"),
        (["--rate=2", "--requests=4"], "6 prompts, but 2 requests/s need 20"),
        (["--clients=1", "--peers=transformers"], "--peers transformers: it has no server"),
        (["--clients=1", "--threads=999"], "--threads 999: this process may use"),
        (["--clients=8", "--requests=4"], "--requests 4: fewer than the 8 clients"),
        (["--clients=4", "--requests=4"], "6 prompts, but 4 clients need 8"),
        (["--clients=1", "--requests=4", "--peers=vllm"], "make bench-peers"),
    ],
)
def test_what_is_wrong_is_one_line(
    given: list[str],
    message: str,
    command: Command,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specdec_core.servers.vllm.process.VENV", tmp_path / "nowhere")
    done = command(bench_serve.main, tmp_path / "home", *arguments, *given)
    assert_refused(done, message)
    assert not any((tmp_path / "home" / "bench").rglob("*"))
