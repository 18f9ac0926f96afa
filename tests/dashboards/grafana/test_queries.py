"""Every query of the Grafana dashboard finds something in a real Prometheus that scrapes a real
server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from time import monotonic, sleep
from typing import Any

import httpx
import pytest

from cluster.serving.server_process import ServerProcess, running
from dashboards.grafana.settings import prometheus_file, queries
from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.models.pair import Pair
from tests.local_server import engine_server

http = httpx.Client(timeout=30)


@pytest.fixture(scope="module")
def prometheus(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that has scraped a server before and after requests."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not on the PATH")
    folder = tmp_path_factory.mktemp("prometheus")
    with running(engine_server(tiny_pair, Configuration(drafter=DraftModelSettings()), 2)) as url:
        file = prometheus_file(folder, url, interval="1s")

        def command(port: int) -> list[str]:
            address = f"--web.listen-address=127.0.0.1:{port}"
            data = f"--storage.tsdb.path={folder / 'data'}"
            return ["prometheus", f"--config.file={file}", data, address]

        scraper = ServerProcess("prometheus", command, os.environ, "/-/ready")
        with running(scraper) as address:
            wait_for(address, "vllm:generation_tokens_total == 0")
            body = {"prompt": "def main(", "max_tokens": 40, "ignore_eos": True}
            for _ in range(3):
                http.post(f"{url}/v1/completions", json=body).raise_for_status()
            wait_for(address, "vllm:generation_tokens_total == 120")
            yield address


def found(address: str, query: str) -> list[Any]:
    answer = http.get(f"{address}/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


def wait_for(address: str, query: str) -> None:
    end = monotonic() + 60
    while not found(address, query):
        assert monotonic() < end, query
        sleep(0.2)


def test_every_query_of_the_dashboard_finds_numbers(prometheus: str) -> None:
    panels = {}
    for title, query in queries():
        values = [sample["value"][1] for sample in found(prometheus, query)]
        panels.setdefault(title, []).append(bool(values) and "NaN" not in values)
    assert len(panels) > 12
    assert [title for title, answers in panels.items() if not all(answers)] == []


def test_a_query_for_what_is_not_counted_finds_nothing(prometheus: str) -> None:
    assert found(prometheus, "vllm:no_such_metric_total") == []
