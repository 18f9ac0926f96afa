"""Watch a server with Prometheus, and with Grafana where it is installed."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

from typer import Option

from cluster.serving.control import known_certificate
from cluster.serving.server_process import ServerProcess
from cluster.serving.tls import own_certificate
from dashboards.grafana.settings import DASHBOARD, grafana_files, graphs, prometheus_file
from jobs.console import console, on_stop, run, wait_for_stop
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace

SHOWN = ("Throughput", "Time to first token", "Acceptance by position")


def main(
    url: Annotated[str, Option(help="The server's address.")] = "http://127.0.0.1:8000",
    port: Annotated[int, Option(min=1, max=65535, help="Port of Prometheus.")] = 9090,
    grafana_port: Annotated[int, Option(min=1, max=65535, help="Port of Grafana.")] = 3000,
    interval: Annotated[int, Option(min=1, help="Seconds between looks at the server.")] = 5,
    key_file: Annotated[
        Path | None,
        Option(
            help="File with an API key as clients send it, where the server wants one; not the"
            " server's --api-key-file, which has hashes."
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        Option(
            help="The server's certificate, where no authority vouches for it; that of this"
            " workspace's server is known."
        ),
    ] = None,
) -> None:
    """Have Prometheus scrape a server, and Grafana show it, until Ctrl-C. Both listen on this
    machine alone; their files are in the workspace's folder `watch`."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--url {url}: expected an address such as http://127.0.0.1:8000")
    if key_file is not None and not key_file.is_file():
        raise UserError(f"--key-file {key_file}: no such file")
    if tls_cert is not None and not tls_cert.is_file():
        raise UserError(f"--tls-cert {tls_cert}: no such file")
    if shutil.which("prometheus") is None:
        raise UserError(
            "prometheus is not on the PATH: install it (Debian: apt-get install prometheus), or"
            f" have yours scrape {url}/metrics; the dashboard for Grafana is {DASHBOARD}"
        )
    on_stop(signal.default_int_handler)
    try:
        with ExitStack() as servers:
            certificate = tls_cert or known_certificate(url)
            watched = _prometheus(url, interval, key_file, certificate)
            servers.callback(watched.stop)
            prometheus = watched.start(port)
            console.print(
                f"[green]Prometheus[/green]  {graphs(prometheus, *SHOWN)}", soft_wrap=True
            )
            home = _grafana_home()
            if home is None:
                console.print(
                    f"Grafana is not on the PATH. In yours, add {prometheus} as a data source of"
                    f" type Prometheus and import {DASHBOARD}",
                    soft_wrap=True,
                )
            else:
                shown = _grafana(home, prometheus, grafana_port)
                servers.callback(shown.stop)
                console.print(f"[green]Grafana[/green]     {shown.start(grafana_port)}/d/specdec")
            console.print("Ctrl-C stops watching.")
            wait_for_stop()
            console.print("stopped")
    except KeyboardInterrupt:
        console.print("stopped")


def _prometheus(
    url: str, interval: int, key_file: Path | None, certificate: Path | None
) -> ServerProcess:
    folder = workspace() / "watch"
    known = own_certificate(certificate) if certificate else None
    file = prometheus_file(folder, url, interval, key_file, known)

    def command(port: int) -> list[str]:
        return [
            "prometheus",
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]

    return ServerProcess("prometheus", command, os.environ, "/-/ready")


def _grafana_home() -> Path | None:
    """The folder with Grafana's own files: the one above its program, or where packages put it."""
    program = shutil.which("grafana")
    if program is None:
        return None
    folders = [Path(program).resolve().parents[1], Path("/usr/share/grafana")]
    return next((folder for folder in folders if (folder / "public").is_dir()), None)


def _grafana(home: Path, prometheus: str, port: int) -> ServerProcess:
    folder = workspace() / "watch"
    settings = {
        "GF_PATHS_PROVISIONING": str(grafana_files(folder, prometheus)),
        "GF_PATHS_DATA": str(folder / "grafana" / "data"),
        "GF_PATHS_LOGS": str(folder / "grafana" / "logs"),
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(port),
        # Another site's name that was made to lead here is sent away (DNS rebinding).
        "GF_SERVER_DOMAIN": "127.0.0.1",
        "GF_SERVER_ENFORCE_DOMAIN": "true",
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        # There is no sign-in, and no administrator with a default password.
        "GF_AUTH_DISABLE_LOGIN_FORM": "true",
        "GF_AUTH_BASIC_ENABLED": "false",
        "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION": "true",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    }
    command = ["grafana", "server", f"--homepath={home}"]
    return ServerProcess("grafana", lambda _: command, os.environ | settings, "/api/health")


if __name__ == "__main__":
    run(main)
