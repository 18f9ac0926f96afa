"""`make watch` has a real Prometheus scrape a real server, and every query of the dashboard
finds numbers there."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
import yaml

from cluster.serving.control import announced, known_certificate
from cluster.serving.served import Operation
from cluster.serving.server_process import ServerProcess, running
from dashboards.grafana.settings import prometheus_file, queries
from jobs.watch import _grafana, main
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.models.pair import Pair
from tests.local_server import engine_server

http = httpx.Client(timeout=30)


@pytest.fixture(scope="module")
def prometheus(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that has scraped a server before and after requests."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not on the PATH")
    home = {"SPECDEC_HOME": str(tmp_path_factory.mktemp("watched"))}
    with running(engine_server(tiny_pair, Configuration(drafter=DraftModelSettings()), 2)) as url:

        def command(port: int) -> list[str]:
            options = [f"--url={url}", f"--port={port}", "--interval=1"]
            return [sys.executable, "-m", "jobs.watch", *options]

        watch = ServerProcess("make watch", command, os.environ | home, "/-/ready")
        with running(watch) as address:
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


def test_the_certificate_of_an_encrypted_server_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_spec: PairSpec
) -> None:
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    certificate, url = tmp_path / "cert.pem", "https://127.0.0.1:8123"
    with announced(url, tiny_spec, Operation("secret"), certificate):
        known = known_certificate(f"{url}/")
    assert (known, known_certificate(url)) == (certificate, None)
    file = prometheus_file(tmp_path, url, 5, certificate="the certificate")
    [job] = yaml.safe_load(file.read_text())["scrape_configs"]
    assert job["scheme"] == "https"
    assert Path(job["tls_config"]["ca_file"]).read_text() == "the certificate"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "localhost:8000"}, "--url localhost:8000: expected an address"),
        ({"key_file": Path("nowhere")}, "--key-file nowhere: no such file"),
        ({"tls_cert": Path("nowhere")}, "--tls-cert nowhere: no such file"),
        ({}, "prometheus is not on the PATH: install it"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=re.escape(said)):
        main(**options)


def test_grafana_shows_and_lets_nobody_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    settings = _grafana(tmp_path, "http://127.0.0.1:9090", 3000).environment
    wanted = {
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_DOMAIN": "127.0.0.1",
        "GF_SERVER_ENFORCE_DOMAIN": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "GF_AUTH_DISABLE_LOGIN_FORM": "true",
        "GF_AUTH_BASIC_ENABLED": "false",
    }
    assert {name: settings[name] for name in wanted} == wanted
