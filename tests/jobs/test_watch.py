"""`make watch` has a real Prometheus scrape a real server, and every query of the dashboard finds
numbers there. Grafana shows and changes nothing."""

import json
import os
import shutil
import signal
import subprocess
from contextlib import suppress

import httpx
import pytest
import yaml

from specdec_core.servers.process import free_port, running
from tests.commands import ROOT, wait_until
from tests.configurations import CHAIN
from tests.local_server import engine_server

GRAFANA = ROOT / "dashboards" / "grafana"
http = httpx.Client(timeout=30)


@pytest.fixture(scope="module")
def prometheus(tiny_pair, tmp_path_factory):
    """The URL of a Prometheus that has scraped a server before and after requests."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not on the PATH")
    folder, address = tmp_path_factory.mktemp("watch"), f"127.0.0.1:{free_port()}"
    (folder / "dashboards").symlink_to(ROOT / "dashboards")
    with running(engine_server(tiny_pair, CHAIN, 2)) as url:
        server = url.removeprefix("http://")
        given = [f"SERVER={server}", f"PROMETHEUS={address}", "EVERY=1s"]
        with subprocess.Popen(
            ["make", "--file", str(ROOT / "Makefile"), "watch", *given],
            cwd=folder,
            start_new_session=True,
        ) as watch:
            try:
                wait_for(f"http://{address}", "vllm:generation_tokens_total == 0")
                body = {"prompt": "def main(", "max_tokens": 40, "ignore_eos": True}
                for _ in range(3):
                    http.post(f"{url}/v1/completions", json=body).raise_for_status()
                wait_for(f"http://{address}", "vllm:generation_tokens_total == 120")
                yield f"http://{address}"
            finally:
                os.killpg(watch.pid, signal.SIGTERM)


def found(address, query):
    answer = http.get(f"{address}/api/v1/query", params={"query": query})
    return answer.raise_for_status().json()["data"]["result"]


def wait_for(address, query):
    def there():
        with suppress(httpx.HTTPError):  # it starts, or answers 503 until its store is ready
            return found(address, query)

    wait_until(there, 60)


def queries():
    """Each panel's title and one of its queries, in PromQL for all models."""
    for panel in json.loads((GRAFANA / "specdec.json").read_text())["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*")
            yield panel["title"], query


def test_every_query_of_the_dashboard_finds_numbers(prometheus):
    panels: dict[str, list[bool]] = {}
    for title, query in queries():
        values = [sample["value"][1] for sample in found(prometheus, query)]
        panels.setdefault(title, []).append(bool(values) and "NaN" not in values)
    assert len(panels) > 12
    assert [title for title, answers in panels.items() if not all(answers)] == []
    assert found(prometheus, "vllm:no_such_metric_total") == []


def test_grafana_is_read_only_and_reached_from_this_machine_alone():
    services = yaml.safe_load((GRAFANA / "compose.yaml").read_text())["services"]
    wanted = {
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_DOMAIN": "127.0.0.1",
        "GF_SERVER_ENFORCE_DOMAIN": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "GF_AUTH_DISABLE_LOGIN_FORM": "true",
        "GF_AUTH_BASIC_ENABLED": "false",
        "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION": "true",
    }
    assert services["grafana"]["environment"].items() >= wanted.items()
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    mounted = [volume.split(":")[0] for each in services.values() for volume in each["volumes"]]
    assert all((GRAFANA / place).exists() for place in mounted)
