"""Files that have Prometheus scrape a server, and Grafana show the dashboard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import yaml

from specdec_core.base.files import write_atomically

DASHBOARD = Path(__file__).with_name("specdec.json")


def prometheus_file(
    folder: Path,
    server: str,
    interval: int,
    key_file: Path | None = None,
    certificate: str | None = None,
) -> Path:
    """The configuration in `folder` of a Prometheus that scrapes the server at this URL every
    `interval` seconds. The file `key_file` has the server's API key, where it wants one, and
    `certificate` is the one that it is known by (PEM), where no authority vouches for it."""
    address = urlsplit(server)
    job: dict[str, Any] = {
        "job_name": "specdec",
        "scheme": address.scheme,
        "metrics_path": f"{address.path.rstrip('/')}/metrics",
        "static_configs": [{"targets": [address.netloc]}],
    }
    if key_file is not None:
        job["authorization"] = {"credentials_file": str(key_file.resolve())}
    if certificate is not None:
        file = write_atomically(folder / "certificate.pem", certificate)
        job["tls_config"] = {"ca_file": str(file.resolve())}
    settings = {"global": {"scrape_interval": f"{interval}s"}, "scrape_configs": [job]}
    return write_atomically(folder / "prometheus.yml", yaml.safe_dump(settings, sort_keys=False))


def grafana_files(folder: Path, prometheus: str) -> Path:
    """The provisioning folder of a Grafana with the dashboard and, as its source, the Prometheus at
    this URL."""
    provisioning = folder / "grafana" / "provisioning"
    source = {"name": "Prometheus", "type": "prometheus", "url": prometheus, "isDefault": True}
    dashboards = {
        "name": "specdec",
        "type": "file",
        "options": {"path": str(DASHBOARD.parent)},
    }
    for name, settings in {
        "datasources": {"apiVersion": 1, "datasources": [{**source, "access": "proxy"}]},
        "dashboards": {"apiVersion": 1, "providers": [dashboards]},
    }.items():
        write_atomically(
            provisioning / name / "specdec.yaml", yaml.safe_dump(settings, sort_keys=False)
        )
    return provisioning


def queries(interval: str = "1m") -> Iterator[tuple[str, str]]:
    """Each panel's title and one of its queries, in PromQL for all models; rates are over
    `interval`."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", interval).replace("$model", ".*")
            yield panel["title"], query


def graphs(prometheus: str, *titles: str) -> str:
    """The address of the page of Prometheus with the queries of some panels."""
    chosen = [query for title in titles for name, query in queries() if name == title]
    fields: dict[str, str] = {}
    for n, query in enumerate(chosen):
        fields |= {f"g{n}.expr": query, f"g{n}.tab": "0", f"g{n}.range_input": "15m"}
    return f"{prometheus}/graph?{urlencode(fields)}"
