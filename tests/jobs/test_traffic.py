"""Changed traffic starts a command."""

import shlex
import sys
import time

import httpx
import pytest

from cluster.serving import drift
from cluster.serving.control import RunningServer
from cluster.serving.http.access import Access
from cluster.serving.served import Operation
from jobs.traffic import SIGNAL, read_command, watched
from specdec_core.base.errors import UserError
from specdec_core.engine import Engine
from specdec_core.servers.process import running
from tests.commands import wait_until
from tests.configurations import CHAIN
from tests.local_server import server_of, service_of

OPERATION = Operation("a secret")
KEYS = Access(keys=(b"nobody's hash",)).admitting(OPERATION.token)


@pytest.fixture
def server(tiny_pair):
    """One that asks for keys, of which the operator's token is one."""
    service = service_of(Engine(tiny_pair, CHAIN), operation=OPERATION, access=KEYS)
    with running(server_of(service)) as url:
        yield RunningServer(url=url, token="a secret", pair=tiny_pair.spec)


def ask(server, tokens, prompt="def main("):
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    headers = {"authorization": f"Bearer {server.token}"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


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
    with watched(server, command, said.append, 0.2):
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
    headers = {"authorization": f"Bearer {server.token}"}
    page = httpx.get(f"{server.url}/metrics", headers=headers).text
    assert 'specdec:drift_alarms_total{model_name="tiny",signal="prompt_tokens"} 1.0' in page


def test_a_command_that_is_none_is_one_line():
    assert read_command(None) == ()
    for text in ("", "no-such-program --x", "echo 'a"):
        with pytest.raises(UserError, match="--on-drift"):
            read_command(text)
