"""What a real vLLM writes of its speculation is read: `/metrics`, and metrics in responses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from cluster.serving.server_process import ServerProcess, running
from specdec_core.config import PairSpec, RunnerSettings
from specdec_core.evidence.peers.vllm import VENV
from specdec_core.evidence.peers.vllm_server import VllmServer, vllm_servers
from specdec_core.models.pair import load_pair
from specdec_core.prompts.prompt_sets import load_prompts
from specdec_core.recordings.production import read_vllm

RUNNER = RunnerSettings(target_dtype="float32", draft_dtype="float32", max_length=512)
PER_REQUEST = ["--enable-per-request-metrics", "--per-request-spec-decode-metrics", "summary"]
PAIR = PairSpec(drafts={"small": "bundled:draft-small"}, runner=RUNNER)


def write_production(vllm: VllmServer, prompts: Sequence[Sequence[int]], folder: Path) -> None:
    """Have vLLM answer prompts, and keep what it writes: `metrics.txt` and `responses.jsonl`."""

    def command(port: int) -> list[str]:
        flags = [flag for flag in vllm.command(2, port) if flag != "--disable-log-stats"]
        return [*flags, *PER_REQUEST]

    server = ServerProcess(vllm.name, command, vllm.environment([], folder))
    with running(server) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        asked = {"model": model, "max_tokens": 32, "temperature": 0}
        answers = [http.post("/v1/completions", json={**asked, "prompt": p}) for p in prompts]
        (folder / "metrics.txt").write_text(http.get("/metrics").text)
    assert {answer.status_code for answer in answers} == {httpx.codes.OK}
    (folder / "responses.jsonl").write_text("".join(f"{answer.text}\n" for answer in answers))


@pytest.mark.long
@pytest.mark.skipif(not VENV.exists(), reason="vLLM is not installed; `make bench-peers` does")
def test_metrics_and_responses_of_a_server_tell_the_same(tmp_path: Path) -> None:
    pair = load_pair(PAIR)
    vllm = next(v for v in vllm_servers(pair) if v.mode.tokens == 3)
    prompts = load_prompts("bundled:held_out", 6, pair.tokenizer)
    texts = [pair.tokenizer(prompt.text)["input_ids"] for prompt in prompts]
    write_production(vllm, texts, tmp_path)
    sums, answers = (read_vllm(tmp_path / name) for name in ("metrics.txt", "responses.jsonl"))
    assert (sums.length, len(sums.accepted)) == (3, 3)
    assert sums.accepted[0] > 0
    assert (sums.accepted, sums.candidates) == (answers.accepted, answers.candidates)
    assert (sums.steps, sums.proposed) == (answers.steps, answers.proposed)
    assert sums.seconds == pytest.approx(answers.seconds, rel=0.1)
