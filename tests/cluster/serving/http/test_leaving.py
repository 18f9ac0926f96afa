"""Clients that leave midway cost a server nothing that lasts."""

import asyncio
import time
from dataclasses import replace
from random import Random

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.serving.engine_process import EngineProcess
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.engine import Engine
from specdec_core.engine.scheduler import Limits
from specdec_core.servers.process import running
from tests.configurations import CHAIN
from tests.local_server import engine_server, server_of, service_of

HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
WORDS = ("def", "class", "import", "return", "if", "x", "y", "1", "(", ")", ":")


async def asked(url, requests, clients=32):
    """Send random requests from clients of which a third leaves midway. Returns the number of
    requests that were answered, and of those that were given up."""
    random, counts = Random(0), {"answered": 0, "left": 0}
    limits = httpx.Limits(max_connections=None)

    async def ask():
        most = random.randint(1, 8) if random.random() < 1 / 3 else None
        body = {
            "prompt": " ".join(random.choices(WORDS, k=random.randint(1, 40))),
            "max_tokens": random.randint(8, 48),
            "temperature": random.choice([0, 1]),
            "n": random.choice([1, 1, 1, 2]),
            "ignore_eos": True,
            "stream": True,
        }
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            events = 0
            async for line in answer.aiter_lines():
                assert not line.startswith('data: {"error"')
                if line == "data: [DONE]":
                    return "answered"
                events += line.startswith("data:")
                if events == most:
                    return "left"
        raise AssertionError("the answer broke off")

    async def client():
        for _ in waiting:
            counts[await ask()] += 1

    waiting = iter(range(requests))
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600, trust_env=False) as http:
        await asyncio.gather(*(client() for _ in range(clients)))
    return counts["answered"], counts["left"]


def lost(url, seconds=30):
    """Whether requests or parts of the cache are still held after this time."""
    end = time.monotonic() + seconds
    while True:
        page = httpx.get(f"{url}/metrics", trust_env=False).text
        samples = [s for f in text_string_to_metric_families(page) for s in f.samples]
        held = [sample.value for sample in samples if sample.name in HELD]
        assert len(held) == len(HELD)
        if not any(held) or time.monotonic() > end:
            return any(held)
        time.sleep(0.1)


def test_clients_that_leave_take_nothing_with_them(chat_url):
    answered, left = asyncio.run(asked(chat_url, 48))
    assert answered + left == 48
    assert 6 <= left <= 28
    assert not lost(chat_url)


def test_what_they_took_would_be_found(tiny_pair, monkeypatch):
    """The bug: a request whose client has left keeps some of the cache."""

    class Kept(Engine):
        lost = 0

        def cancel(self, request_id):
            super().cancel(request_id)
            self.lost += 1

        def status(self):
            status = super().status()
            return replace(status, cache_usage=status.cache_usage + 0.01 * self.lost)

    monkeypatch.setattr("tests.local_server.Engine", Kept)
    with running(engine_server(tiny_pair, AUTOREGRESSIVE, 2)) as url:
        assert asyncio.run(asked(url, 24))[1]
        assert lost(url, 0.5)


@pytest.mark.long
def test_a_thousand_requests_lose_nothing(tiny_spec):
    """With the engine in a process of its own, as `specdec serve` has it."""
    with running(server_of(service_of(EngineProcess(tiny_spec, CHAIN, Limits(8))))) as url:
        assert sum(asyncio.run(asked(url, 1000))) == 1000
        assert not lost(url)
