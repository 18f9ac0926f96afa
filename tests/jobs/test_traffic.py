"""What a server does is a run in MLflow, also where MLflow is away for a while."""

import shlex
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from cluster.serving import drift
from cluster.serving.control import RunningServer
from cluster.serving.http.access import Access
from cluster.serving.served import Operation
from dashboards.store import connect
from dashboards.tracking.server_runs import log_canary
from jobs.traffic import SIGNAL, Watch, between, read_command, watched
from specdec_core.base.errors import UserError
from specdec_core.engine import Engine
from specdec_core.models.pair import Pair
from specdec_core.servers.process import free_port, running
from tests.commands import wait_until
from tests.configurations import CHAIN
from tests.local_server import server_of, service_of

OPERATION = Operation("a secret")
KEYS = Access(keys=(b"nobody's hash",)).admitting(OPERATION.token)


@pytest.fixture
def server(tiny_pair: Pair) -> Iterator[RunningServer]:
    """One that asks for keys, of which the operator's token is one."""
    service = service_of(Engine(tiny_pair, CHAIN), operation=OPERATION, access=KEYS)
    with running(server_of(service)) as url:
        yield RunningServer(url=url, token="a secret", pair=tiny_pair.spec)


def ask(server: RunningServer, tokens: int, prompt: str = "def main(") -> dict:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    headers = {"authorization": f"Bearer {server.token}"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_traffic_and_a_canarys_end_are_runs_of_the_pair(server, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    client = connect()  # it makes the database, which can take longer than the end waits
    warned: list[str] = []
    looked = threading.Event()
    metrics = RunningServer.metrics

    def look(self: RunningServer) -> str:
        try:
            return metrics(self)
        finally:
            looked.set()

    monkeypatch.setattr(RunningServer, "metrics", look)
    with watched(server, Watch(every=3600), warned.append):
        assert looked.wait(60)
        answers = [ask(server, 30) for _ in range(2)]
    assert not warned
    experiment = client.get_experiment_by_name(server.name)
    [run] = client.search_runs([experiment.experiment_id], "tags.traffic != ''")
    assert run.info.status == "FINISHED"
    assert run.data.params["served.configuration"] == CHAIN.id
    found = run.data.metrics
    counts = [answer["specdec"] for answer in answers]
    assert found["mat"] == pytest.approx(60 / sum(c["rounds"] for c in counts))
    drafted, accepted = (sum(c[name] for c in counts) for name in ("drafted", "accepted"))
    assert found["acceptance"] == pytest.approx(accepted / drafted)
    assert found["generation_tokens_per_second"] > 0
    assert found["time_to_first_token_seconds.mean"] > 0
    assert found["num_requests_running"] == 0

    reason, times = "it is slower, 0.80×", {"pairs": 12, "ratio": 0.8, "low": 0.7, "high": None}
    state = {"configuration": "c2", "label": "another", "share": 0.1, "state": "dropped"}
    state |= {"reason": reason, **times}
    canary = client.get_run(log_canary(server.name, CHAIN.id, state))
    assert canary.info.status == "FINISHED"
    assert canary.info.experiment_id == experiment.experiment_id
    assert canary.data.metrics == {"canary.pairs": 12, "canary.ratio": 0.8, "canary.low": 0.7}
    assert canary.data.params == {"champion": CHAIN.id, "challenger": "c2", "share": "0.1"}
    assert canary.data.tags["reason"] == reason


def test_a_store_that_is_away_costs_a_line_and_no_request(server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    warned: list[str] = []
    with watched(server, Watch(every=3600), warned.append):
        assert ask(server, 4)["usage"]["completion_tokens"] == 4
    [line] = warned
    assert line.endswith("; the traffic is logged later")


def test_changed_traffic_is_said_and_starts_the_command(server, tmp_path, monkeypatch):
    monkeypatch.setattr(drift, "SECONDS", 0.0)
    monkeypatch.setattr(drift, "REQUESTS", 1)
    monkeypatch.setattr(drift, "WEEK", 1e-6)  # each mean may bring the most of false alarms
    said: list[str] = []
    script = (
        "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(os.environ[sys.argv[2]])"
    )
    told = tmp_path / "told"
    words = [sys.executable, "-c", script, str(told), SIGNAL]
    command = read_command(shlex.join(words))
    with watched(server, Watch(track=False, every=0.2, on_drift=command), said.append):
        time.sleep(0.3)  # it has looked
        for prompt in [*["import"] * 15, *["import " * 30] * 60]:
            ask(server, 1, prompt)
            if server.health()["drift"]:
                break
        wait_until(lambda: told.exists() and told.read_text(), 60)
    assert told.read_text() == "prompt_tokens"
    [line] = said
    assert line.startswith("the traffic has changed (prompt_tokens): ")
    [alarm] = server.health()["drift"]
    assert alarm["signal"] == "prompt_tokens"
    assert 'specdec:drift_alarms_total{model_name="tiny",signal="prompt_tokens"} 1.0' in (
        server.metrics()
    )


def test_a_command_that_is_none_is_one_line():
    assert read_command(None) == ()
    for text in ("", "no-such-program --x", "echo 'a"):
        with pytest.raises(UserError, match="--on-drift"):
            read_command(text)


def page(requests: int, first_tokens: tuple[float, int] = (0.0, 0)) -> str:
    """A page of metrics of two replicas, with one of a library."""
    seconds, count = first_tokens
    lines = ["# TYPE python_gc counter", f"python_gc_total {requests}"]
    lines += ["# TYPE vllm:request_success counter"]
    for replica in "ab":
        lines.append(f'vllm:request_success_total{{replica="{replica}"}} {requests}')
    lines += ["# TYPE vllm:first histogram", f'vllm:first_bucket{{le="+Inf"}} {count}']
    return "\n".join([*lines, f"vllm:first_sum {seconds}", f"vllm:first_count {count}", ""])


def test_counters_of_all_replicas_are_summed_and_may_begin_anew():
    found = between(page(3), page(8), 5.0)
    assert found == {"request_success_per_second": 2.0}
    assert between(page(3), page(1), 1.0) == {"request_success_per_second": 2.0}


def test_a_histogram_is_the_mean_of_what_was_observed():
    assert between(page(0, (1.0, 2)), page(0, (4.0, 4)), 1.0)["first.mean"] == 1.5


def test_shares_of_replicas_are_averaged_and_signals_kept_apart():
    lines = ["# TYPE vllm:kv_cache_usage_perc gauge", "# TYPE specdec:drift_evidence gauge"]
    lines += [f'vllm:kv_cache_usage_perc{{replica="{n}"}} {n / 4}' for n in (2, 3)]
    lines += [f'specdec:drift_evidence{{signal="{name}"}} 0.6' for name in ("acceptance", "x")]
    found = between("\n", "\n".join([*lines, ""]), 1.0)
    assert found == {
        "kv_cache_usage_perc": 0.625,
        "drift_evidence.acceptance": 0.6,
        "drift_evidence.x": 0.6,
    }
