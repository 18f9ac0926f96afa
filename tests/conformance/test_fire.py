"""Clients that leave cost the server nothing that lasts, and JSON answers follow their schemas."""

from dataclasses import replace

import pytest

from cluster.serving.engine_process import EngineProcess
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.engine import Engine
from specdec_core.engine.engine import EngineStatus
from specdec_core.engine.scheduler import Limits
from specdec_core.servers.process import running
from tests.configurations import CHAIN
from tests.conformance import fire
from tests.conformance.__main__ import main
from tests.conformance.fire import Fire, JsonAnswers, json_answers, under_fire
from tests.local_server import engine_server, server_of, service_of


def test_clients_that_leave_take_nothing_with_them(chat_url):
    found = under_fire(chat_url, None, 24)
    assert (found.failed, found.running, found.cache) == ([], 0, 0)
    assert found.answered + found.left == 48
    assert 6 <= found.left <= 28
    assert found.memory is None or found.memory[0] > 0


def test_what_they_took_would_be_found(tiny_pair, monkeypatch):
    """The bug: a request whose client has left keeps some of the cache."""
    monkeypatch.setattr(fire, "_SETTLE", 0.5)

    class Kept(Engine):
        lost = 0

        def cancel(self, request_id: str) -> None:
            super().cancel(request_id)
            self.lost += 1

        def status(self) -> EngineStatus:
            status = super().status()
            return replace(status, cache_usage=status.cache_usage + 0.01 * self.lost)

    monkeypatch.setattr("tests.local_server.Engine", Kept)
    with running(engine_server(tiny_pair, AUTOREGRESSIVE, 2)) as url:
        found = under_fire(url, None, 12)
    assert found.left
    assert any("were lost" in fault for fault in found.faults)


@pytest.mark.long
def test_a_thousand_requests_lose_nothing(tiny_spec):
    """With the engine in a process of its own, as `specdec serve` has it. The server's process is
    the clients', too, so memory is measured by `python -m tests.conformance` alone."""

    service = service_of(EngineProcess(tiny_spec, CHAIN, Limits(8)))
    with running(server_of(service)) as url:
        found = under_fire(url, None, 1000)
        answers = json_answers(url, None, 500)
    assert (found.failed, found.running, found.cache) == ([], 0, 0)
    assert answers.faults == []


def test_json_answers_follow_their_schemas(chat_url):
    found = json_answers(chat_url, None, 8)
    assert found.invalid == []
    assert 0 < found.ended <= found.asked == 8


def test_what_is_wrong_is_said():
    assert Fire(memory=(100.0, 101.9)).faults == []
    [grown] = Fire(memory=(100.0, 103.0)).faults
    assert grown == "memory grew by 3.0%"
    assert JsonAnswers(asked=500, ended=495).faults == []
    assert JsonAnswers(asked=500, ended=494).faults == ["494 of 500 ended"]
    assert JsonAnswers(1, 1, ["'{'"]).faults == ["1 invalid: '{'"]


def test_the_command_names_what_it_needs():
    with pytest.raises(UserError, match="give --leaving or --answers"):
        main("http://127.0.0.1:9")
