"""However `specdec serve` is stopped: it takes no more requests at once, answers under way have
`--drain` seconds, and no process of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

import httpx
import psutil
import pytest

from cluster.serving.server_process import free_port
from tests.jobs.test_serve import ROOT, config  # noqa: F401 (a fixture)

DRAIN = 2.0  # seconds
LATE = 5.0  # in which a busy machine notices that they are over
ALL = "every process"
BODY = {
    "prompt": "def main(",
    "max_tokens": 200,
    "ignore_eos": True,
    "stream": True,
    "speculative": {"enabled": False},
}

http = httpx.Client(timeout=5, trust_env=False)


class Running:
    """A server, with all of its processes in a workspace of its own."""

    def __init__(self, config: Path, home: Path, before: tuple[str, ...] = ()) -> None:  # noqa: F811
        self.home, self.port = home, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "jobs.serve", "--config", str(config), "--no-track"]
        self.process = subprocess.Popen(
            [*before, *command, "--port", str(self.port), "--drain", str(DRAIN), "--slots", "8"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
            | {"SPECDEC_HOME": str(home)},
        )
        assert self.process.stdout is not None
        said = ""
        for line in self.process.stdout:
            said += line
            if "Ctrl-C" in line:
                return
        raise AssertionError(said)

    def processes(self, name: str = ALL) -> list[psutil.Process]:
        """Those that are alive: all, or those whose command has this in it."""
        if name == "main":
            return [psutil.Process(self.process.pid)]
        found = []
        for process in psutil.process_iter():
            try:
                home = process.environ().get("SPECDEC_HOME")
                command = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if home == str(self.home) and (name == ALL or name in command):
                found.append(process)
        return found

    def status(self) -> int | None:
        """What `/ready` answers; None: nothing."""
        try:
            return http.get(f"{self.url}/ready").status_code
        except httpx.TransportError:
            return None


class Client(Thread):
    """Asks for a stream. `ended` is when its last part came."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url, self.parts, self.ended, self.whole = url, 0, 0.0, False

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=BODY, timeout=60, trust_env=False
            ) as answer:
                for line in answer.iter_lines():
                    self.parts, self.ended = self.parts + 1, monotonic()
                    self.whole |= line == "data: [DONE]"
        except httpx.TransportError:
            self.ended = monotonic()


@pytest.fixture
def start(config: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:  # noqa: F811
    started = []

    def start(*before: str) -> Running:
        started.append(Running(config, tmp_path / "home", before))
        return started[-1]

    yield start
    for server in started:
        for process in server.processes():
            process.kill()


def asked(server: Running, clients: int) -> list[Client]:
    """Clients that are being answered."""
    asking = [Client(server.url) for _ in range(clients)]
    for client in asking:
        client.start()
    while not all(client.parts for client in asking):
        sleep(0.01)
    return asking


def wait_until(done: Callable[[], object], seconds: float) -> None:
    end = monotonic() + seconds
    while not done():
        assert monotonic() < end
        sleep(0.02)


@pytest.mark.parametrize("clients", [0, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("number", "target"),
    [
        (signal.SIGTERM, ALL),  # as systemd does it
        *(
            pytest.param(number, target, marks=pytest.mark.long)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            for target in ("main", "group")
        ),
        pytest.param(signal.SIGHUP, ALL, marks=pytest.mark.long),
    ],
)
def test_a_stop_drains_and_leaves_nothing(
    start: Callable[..., Running], number: signal.Signals, target: str, clients: int
) -> None:
    server = start()
    asking = asked(server, clients)
    assert server.status() == 200
    stopped = monotonic()
    if target == "group":
        os.killpg(server.process.pid, number)
    else:
        for process in server.processes(target):
            process.send_signal(number)
    wait_until(lambda: server.status() != 200, LATE)
    if clients:  # while they are answered, others are refused in words
        assert server.status() == 503
        refused = http.post(f"{server.url}/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_stops"
    for client in asking:
        client.join(60)
        assert client.whole or client.ended - stopped > DRAIN
        assert client.ended - stopped < DRAIN + LATE
    assert server.process.wait(90) == 0
    assert server.processes() == []


@pytest.mark.long
def test_nohup_keeps_it_from_the_terminals_end_alone(start: Callable[..., Running]) -> None:
    server = start("nohup")
    os.killpg(server.process.pid, signal.SIGHUP)
    sleep(1)
    assert server.status() == 200
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.process.wait(90) == 0
    assert server.processes() == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "status"), [("main", -signal.SIGKILL), ("gcs/gcs_server", 2), ("raylet/raylet", 2)]
)
def test_nothing_outlives_a_process_that_all_need(
    start: Callable[..., Running], name: str, status: int
) -> None:
    server = start()
    asking = asked(server, 2)
    [process] = server.processes(name)
    process.kill()
    wait_until(lambda: server.status() != 200, LATE)
    assert server.process.wait(90) == status
    wait_until(lambda: not server.processes(), 60)  # Ray's agents look for the raylet now and then
    for client in asking:
        client.join(60)
        assert not client.is_alive()


@pytest.mark.long
@pytest.mark.parametrize("name", ["engine_main", "ServeReplica", "ServeController"])
def test_a_process_that_is_started_again_does_not_disturb_the_stop(
    start: Callable[..., Running], name: str
) -> None:
    server = start()
    asking = asked(server, 2)
    [process] = server.processes(name)
    process.kill()
    wait_until(lambda: server.status() == 200 and server.processes(name) not in ([], [process]), 90)
    for client in asking:
        client.join(60)
        assert client.whole or name == "ServeReplica"
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.process.wait(90) == 0
    assert server.processes() == []
