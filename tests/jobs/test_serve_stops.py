"""`specdec serve` in its own process. However it is stopped: it takes no more requests at once,
answers under way have `--drain` seconds, and no process of it is left."""

import os
import re
import signal
import subprocess
from threading import Thread
from time import monotonic, sleep

import httpx
import openai
import psutil
import pytest

from cluster.serving.control import find_server
from specdec_core.engine import Engine, Request
from specdec_core.servers.process import free_port
from tests.cluster.serving.test_tls import certificate
from tests.commands import ROOT, config_file, started, wait_until

DRAIN = 2.0  # seconds
LATE = 5.0  # in which a busy machine notices that they are over
ALL = "every process"
WORDS = ("--engine", "words")  # another program's server
BODY = {
    "prompt": "def main(",
    "max_tokens": 200,
    "ignore_eos": True,
    "stream": True,
    "speculative": {"enabled": False},
}

http = httpx.Client(timeout=5, trust_env=False)


class Running:
    """A server, with all of its processes in a workspace of its own. `said` is what it printed
    until it was ready."""

    def __init__(self, home, *options, before=()):
        self.home, self.port, self.said = home, free_port(), ""
        self.url = f"http://127.0.0.1:{self.port}"
        own = ("--slots", 8, "--port", self.port, "--drain", DRAIN)
        self.process = started(home, "-m", "jobs.serve", *own, *options, before=before)
        for line in self.process.stdout:
            self.said += line
            if "Ctrl-C" in line:
                return
        raise AssertionError(self.said)

    def processes(self, name=ALL):
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

    def status(self):
        """What `/ready` answers; None: nothing."""
        try:
            return http.get(f"{self.url}/ready").status_code
        except httpx.TransportError:
            return None


class Client(Thread):
    """Asks for a stream. `ended` is when its last part came."""

    def __init__(self, url):
        super().__init__()
        self.url, self.parts, self.ended, self.whole = url, 0, 0.0, False

    def run(self):
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
def start(tiny_spec, tmp_path, monkeypatch):
    site = ROOT / "tests" / "word_server_site"
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{ROOT}")
    servers = []

    def start(*options, drafter="draft_model", before=()):
        config = config_file(tmp_path, tiny_spec, {"kind": drafter})
        server = Running(tmp_path / "home", "--config", config, *options, before=before)
        servers.append(server)
        return server

    yield start
    for server in servers:
        for process in server.processes():
            process.kill()


def test_an_encrypted_server_answers_curl_until_every_process_of_it_is_stopped(
    start, tmp_path, monkeypatch
):
    tls = certificate(tmp_path / "tls")
    server = start("--tls-cert", tls.certificate, "--tls-key", tls.key)
    url, config = f"https://127.0.0.1:{server.port}", tmp_path / "config.yaml"
    assert url in server.said
    assert ", K=5" in server.said
    assert str(config) in server.said.replace("\n", "")  # a long path is broken into lines
    monkeypatch.setenv("SPECDEC_HOME", str(server.home))
    health = find_server(url).health()
    assert (health["ready"], health["source"]) == (True, config.name)  # no path of the server
    curl = re.search(r"(curl .*?)\n\n", server.said, re.DOTALL)
    answer = subprocess.run(["bash", "-c", curl[1]], capture_output=True, text=True, timeout=120)
    assert answer.stdout.endswith("data: [DONE]\n\n"), answer
    for process in server.processes():  # as systemd does it
        process.send_signal(signal.SIGTERM)
    assert server.process.wait(90) == 0
    assert server.processes() == []


@pytest.mark.long
def test_serves_a_draft_beside_the_target_until_ctrl_c(start, tiny_pair):
    server = start("--cluster", "cluster/local-2.yaml", drafter="pearl")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    engine = Engine(tiny_pair)
    (expected,) = engine.generate([Request("", engine.encode("def main("), 60)])
    for _ in range(200):  # until the draft is ready
        answer = client.completions.create(model=model, prompt="def main(", max_tokens=60)
        assert answer.choices[0].text == expected.text
        if answer.specdec["accepted"]:
            break
    assert answer.specdec["accepted"]
    os.killpg(server.process.pid, signal.SIGINT)  # what a terminal does
    rest, _ = server.process.communicate(timeout=120)
    assert (server.process.returncode, rest.strip()) == (0, "stopped")


def asked(server, clients):
    """Clients that are being answered."""
    asking = [Client(server.url) for _ in range(clients)]
    for client in asking:
        client.start()
    while not all(client.parts for client in asking):
        sleep(0.01)
    return asking


@pytest.mark.long
@pytest.mark.parametrize(("clients", "options"), [(0, ()), (8, ()), (8, WORDS)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("target", ["main", "group", ALL])
def test_a_stop_drains_and_leaves_nothing(start, number, target, clients, options):
    if options and (number, target) == (signal.SIGINT, ALL):
        pytest.skip("the other program is interrupted, too")
    server = start(*options)
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


def assert_ends(server):
    """Its group is terminated, and no process is left."""
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.process.wait(90) == 0
    assert server.processes() == []


@pytest.mark.long
def test_nohup_keeps_it_from_the_terminals_end_alone(start):
    server = start(before=("nohup",))
    os.killpg(server.process.pid, signal.SIGHUP)
    sleep(1)
    assert server.status() == 200
    assert_ends(server)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "status"), [("main", -signal.SIGKILL), ("gcs/gcs_server", 2), ("raylet/raylet", 2)]
)
def test_nothing_outlives_a_process_that_all_need(start, name, status):
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
def test_a_process_that_is_started_again_does_not_disturb_the_stop(start, name):
    server = start()
    asking = asked(server, 2)
    [process] = server.processes(name)
    process.kill()
    wait_until(lambda: server.status() == 200 and server.processes(name) not in ([], [process]), 90)
    for client in asking:
        client.join(60)
        assert client.whole or name == "ServeReplica"
    assert_ends(server)


@pytest.mark.long
@pytest.mark.parametrize("name", ["external_program", "ServeReplica"])
def test_another_program_that_was_started_again_ends_with_the_command(start, name):
    server = start(*WORDS)
    before = server.processes("external_program")
    asking = asked(server, 2)
    for process in server.processes(name):
        process.kill()
    wait_until(lambda: not set(server.processes("external_program")).intersection(before), 60)
    wait_until(lambda: server.status() == 200 and server.processes("external_program"), 90)
    for client in asking:
        client.join(60)
        assert not client.whole
    assert_ends(server)
