"""`specdec bench serve` starts servers, puts them under load, writes and logs."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from jobs import bench_serve
from specdec_core.config import PairSpec
from specdec_core.evidence.load.result import LoadResult
from specdec_core.search.load.workload import Load
from tests.commands import Command, config_file, prompts_file

pytestmark = pytest.mark.usefixtures("ray_running")  # with Ray's other tests: its servers start Ray


@pytest.mark.long
def test_a_server_is_measured_over_http(
    command: Command, tiny_spec: PairSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_core.servers.vllm.process.VENV", tmp_path / "nowhere")
    rows = tmp_path / "rows.yaml"
    rows.write_text("rows: []")  # none but autoregressive decoding
    given = ["--config", config_file(tmp_path, tiny_spec), "--rows", rows, "--max-new-tokens=6"]
    given += ["--prompts", prompts_file(tmp_path, (f"x{n} = {n} +" for n in range(6)))]
    load = ("--rate=20", "--slo=ttft=60", "--requests=4", "--slots=2", "--repeats=1", "--name=mine")
    done = command(bench_serve.main, tmp_path / "home", *given, *load)
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
