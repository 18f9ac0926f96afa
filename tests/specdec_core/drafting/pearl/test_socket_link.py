"""Draft and target in processes of their own, which may die, and over a wire that not everybody
may use."""

import os
import signal
import socket
import time
from contextlib import contextmanager
from multiprocessing import get_context

import pytest

from specdec_core.base.wire import LinkLost
from specdec_core.config import Sampling
from specdec_core.drafting.pearl.asynchronous_draft import serve
from specdec_core.drafting.pearl.link import SocketLink
from specdec_core.engine import Engine, Request
from specdec_core.tokens.statistics import TokenOrigin
from tests.configurations import PEARL
from tests.specdec_core.drafting.pearl.in_turns import linked


@contextmanager
def draft_process(link, pair):
    arguments = ("127.0.0.1", link.port, link.key, pair)
    process = get_context("fork").Process(target=serve, args=arguments, daemon=True)
    process.start()
    assert link.wait(30)
    yield process
    process.kill()
    process.join()


@pytest.fixture
def link():
    link = SocketLink("127.0.0.1")
    yield link
    link.close()


def requests(pair, sampling, tokens=120):
    texts = ["def main():", "import tokenizers", "class Draft:"]
    return [
        Request(str(n), tuple(pair.tokenizer(text)["input_ids"]), tokens, sampling, seed=n)
        for n, text in enumerate(texts)
    ]


def wait_until_ready(engine):
    """A draft that has come still needs a moment, in which decoding is autoregressive."""
    assert engine.drafter.prepare(30)
    [first, *_] = engine.generate(requests(engine.pair, Sampling())[:1])
    assert TokenOrigin.DRAFT in first.origins


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, coupling="gumbel")])
def test_output_is_the_targets_though_the_draft_is_killed(tiny_pair, link, sampling):
    expected = {
        g.request_id: g.tokens for g in Engine(tiny_pair).generate(requests(tiny_pair, sampling))
    }
    engine = Engine(linked(tiny_pair, link), PEARL, slots=2)
    found = {}
    killed_at = alone = 0
    with draft_process(link, tiny_pair) as process:
        wait_until_ready(engine)
        for request in requests(tiny_pair, sampling):
            engine.add(request)
        for round in range(10_000):
            chunks = engine.step()
            found |= {c.request_id: c.finished for c in chunks if c.finished}
            if not killed_at and any(TokenOrigin.DRAFT in c.origins for c in chunks) and round > 4:
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                killed_at = round
            if killed_at and round > killed_at + 1 and link.number == 1:
                # Autoregressively, at once.
                alone += all(len(c.tokens) == 1 for c in chunks)
                if round == killed_at + 6:
                    break
    assert not link.connected
    assert alone >= 4
    with draft_process(link, tiny_pair):
        while not engine.idle:
            found |= {c.request_id: c.finished for c in engine.step() if c.finished}
        wait_until_ready(engine)  # the new one is heard
    assert link.number == 2
    assert {n: g.tokens for n, g in found.items()} == expected


def test_sampled_rejections_fetch_their_distribution(tiny_pair, link):
    sampling = Sampling(temperature=1.0, top_k=20)
    engine = Engine(linked(tiny_pair, link), PEARL, slots=2)
    with draft_process(link, tiny_pair):
        wait_until_ready(engine)
        found = engine.generate(requests(tiny_pair, sampling))
    origins = [origin for g in found for origin in g.origins]
    assert TokenOrigin.CORRECTION in origins
    assert TokenOrigin.DRAFT in origins


def test_a_stranger_does_not_keep_the_engine_waiting(link):
    """Its step asks the link for messages: a connection that says nothing costs it no time."""
    with socket.create_connection(("127.0.0.1", link.port)) as stranger:
        assert len(stranger.recv(1024)) == 32
        began = time.monotonic()
        for _ in range(100):
            assert link.receive() == []
        assert time.monotonic() - began < 1
        assert not link.connected


def test_an_engine_that_is_gone_is_said_to_be(tiny_pair):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(LinkLost, match=f"no process answers at 127.0.0.1:{port}"):
        serve("127.0.0.1", port, b"key", tiny_pair)
