"""The load client sends what it is asked to, when it is asked to, and records every answer."""

import asyncio

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import Request as HttpRequest

from cluster.load.client import run_load
from specdec_core.engine import Engine, Request
from specdec_core.search.load.records import LoadRequest
from specdec_core.servers.process import free_port, running
from tests.configurations import CHAIN
from tests.local_server import LocalServer, engine_server

PROMPTS = ("def main(", "import", "class A:", "return x", "# a")
TOKENS = 12


@pytest.fixture(scope="module")
def url(tiny_pair):
    with running(engine_server(tiny_pair, CHAIN, slots=2, queue=0)) as url:
        yield url


def test_every_answer_is_recorded_with_its_times_and_tokens(url, tiny_pair):
    engine = Engine(tiny_pair)
    workload = [LoadRequest(prompt, TOKENS) for prompt in PROMPTS]
    workload[1] = LoadRequest(engine.encode(PROMPTS[1]), TOKENS)  # tokens are as good as text
    records = run_load(url, workload, 2)
    assert [record.index for record in records] == [0, 1, 2, 3, 4]
    for record, prompt in zip(records, PROMPTS, strict=True):
        tokens = engine.encode(prompt)
        (alone,) = engine.generate([Request("", tokens, TOKENS, ignore_eos=True)])
        assert (record.text, record.error, record.status) == (alone.text, None, 200)
        assert (record.prompt_tokens, record.tokens) == (len(tokens), TOKENS)
        assert 0 <= record.sent <= record.first <= record.last
    assert sum(record.sent < records[0].last for record in records) >= 2  # two at a time
    assert records[2].sent >= min(records[0].last, records[1].last)


def test_what_fails_is_recorded(url):
    workload = [LoadRequest("x", 5), LoadRequest("x", 9999), LoadRequest("", 5)]
    good, long, empty = run_load(url, workload, 1)
    assert good.error is None
    assert long.status == empty.status == 400
    assert "max_tokens is 9999" in long.error
    assert "prompt" in empty.error
    # Two slots, and no room to wait.
    crowded = run_load(url, [LoadRequest(prompt, 200) for prompt in PROMPTS], 5)
    assert {record.status for record in crowded} == {200, 429}
    refused = [record for record in crowded if record.status == 429]
    assert all("try again" in record.error for record in refused)
    (nobody,) = run_load(f"http://127.0.0.1:{free_port()}", workload[:1], 1)
    assert (nobody.status, nobody.last) == (None, None)
    assert nobody.error.startswith("ConnectError")


# What ends lines elsewhere ends none of these.
TEXT = 'data: {"choices": [{"text": "a\x85\u2028\u2029b", "finish_reason": null}]}\n\n'
EMPTY = 'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
USAGE = 'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": %d}}\n\n'
DONE = "data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (TEXT + USAGE % 5 + DONE, None),
        (TEXT + USAGE % 4 + DONE, "wrote 4 of 5 tokens"),
        (TEXT + DONE, "wrote 0 of 5 tokens"),
        (EMPTY + USAGE % 5 + DONE, "wrote no text"),
        (TEXT + USAGE % 5, "the answer broke off"),
        (TEXT + 'data: {"error": {"message": "it failed"}}\n\n' + DONE, "ValueError: it failed"),
        ("data: {\n\n" + DONE, "JSONDecodeError: "),
    ],
)
def test_only_whole_answers_count(events, error):
    async def answer(_):
        yield events

    with running(stub(answer)) as url:
        (record,) = run_load(url, [LoadRequest("x", 5)], 1)
    assert record.error == error or (error and record.error.startswith(error))
    assert error or record.text == "a\x85\u2028\u2029b"


def test_an_open_loop_waits_for_nobody():
    """The server answers only once all requests have come."""
    come = 0

    async def answer(_):
        nonlocal come
        come += 1
        while come < 4:
            await asyncio.sleep(0.001)
        yield TEXT + USAGE % 5 + DONE

    arrivals = (0.0, 0.02, 0.02, 0.05)
    with running(stub(answer)) as url:
        records = run_load(url, [LoadRequest("x", 5, arrival) for arrival in arrivals])
    assert [record.error for record in records] == [None] * 4
    assert all(r.sent >= at for r, at in zip(records, arrivals, strict=True))


def test_a_closed_loop_never_has_more_requests_than_clients():
    most = now = 0

    async def answer(_):
        nonlocal most, now
        now += 1
        most = max(most, now)
        while most < 3:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.005)
        now -= 1
        yield TEXT + USAGE % 5 + DONE

    with running(stub(answer)) as url:
        records = run_load(url, (LoadRequest("x", 5) for _ in range(12)), 3)
    assert len(records) == 12
    assert most == 3


def stub(answer):
    """A server that answers requests, numbered as they come, with these events."""

    def build():
        app, numbers = FastAPI(), iter(range(1_000_000))

        @app.get("/health")
        async def health() -> JSONResponse:
            return JSONResponse({})

        @app.post("/v1/completions")
        async def completions(_: HttpRequest) -> StreamingResponse:
            return StreamingResponse(answer(next(numbers)), media_type="text/event-stream")

        return app

    return LocalServer(build)
