"""An engine behind requests answers as it does alone, and leaves no request waiting."""

import asyncio
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from cluster.serving import replica
from cluster.serving.engine_loop import EngineLoop
from cluster.serving.engine_process import EngineProcess
from cluster.serving.protocol.errors import ApiError
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import load_pair
from specdec_core.tokens.statistics import Generation
from tests.cluster.serving.http.events import client_of
from tests.configurations import BANDIT, CHAIN
from tests.local_server import opened, service_of, threaded


@pytest.fixture
def engine(tiny_pair):
    return Engine(tiny_pair, CHAIN, slots=2)


def request(engine, name, prompt="def main(", tokens=24):
    return Request(name, engine.encode(prompt), max_new_tokens=tokens, ignore_eos=True)


async def generations(submission, count=1):
    """Those of `count` requests, in the order of their ids."""
    done: dict[str, Generation] = {}
    while len(done) < count:
        chunk = await submission.chunks.get()
        if chunk.finished:
            done[chunk.request_id] = chunk.finished
    return [done[name] for name in sorted(done)]


async def test_concurrent_requests_get_the_text_they_get_alone(engine, tiny_pair):
    prompts = ["def main(", "import", "class A:", "return x", "# a"]
    requests = [request(engine, f"{n}", p) for n, p in enumerate(prompts)]
    alone = Engine(tiny_pair, CHAIN)
    expected = [alone.generate([r])[0].tokens for r in requests]

    with opened(EngineLoop(threaded(engine))) as loop:
        both, others = loop.submit(requests[:2]), [loop.submit([r]) for r in requests[2:]]
        results = await asyncio.gather(generations(both, 2), *map(generations, others))
        assert [g.tokens for result in results for g in result] == expected
        assert loop.running == 0
    assert engine.idle


async def test_a_closed_or_lost_submission_frees_its_slots(engine):
    with opened(EngineLoop(threaded(engine))) as loop:
        submission = loop.submit([request(engine, f"closed {i}") for i in range(4)])
        await submission.chunks.get()
        submission.close()
        assert loop.running == 0
        submission = loop.submit([request(engine, f"lost {i}") for i in range(4)])
        del submission
        assert loop.running == 0
        # The engine gets this after the cancellations.
        submission = loop.submit([request(engine, "next", tokens=1)])
        assert len((await generations(submission))[0].tokens) == 1
        assert engine.idle


async def test_a_request_with_several_choices_is_cancelled_once_and_a_refused_one_not_at_all(
    engine,
):
    with opened(EngineLoop(threaded(engine))) as loop:
        submission = loop.submit([request(engine, f"choice {i}") for i in range(4)])
        submission.close()
        submission.close()
        assert loop.cancelled == 1
        with pytest.raises(UserError, match="context"):
            loop.submit([request(engine, "good"), request(engine, "bad", tokens=10_000)])
        assert loop.running == 0
        assert loop.cancelled == 1
        await generations(loop.submit([request(engine, "next", tokens=1)]))
        assert (loop.cancelled, engine.idle) == (1, True)


async def test_a_client_that_leaves_as_its_engine_ends_gives_up_every_choice(engine, monkeypatch):
    """Of an engine on another node, the connection ends before the process is known to have."""
    process, dropped = threaded(engine), []
    monkeypatch.setattr(process._process, "poll", lambda: None)

    with opened(EngineLoop(process)) as loop:
        loop.observer.dropped = dropped.append
        submission = loop.submit([request(engine, f"choice {i}", tokens=200) for i in range(2)])
        await submission.chunks.get()
        process._link._wire._socket.shutdown(socket.SHUT_RDWR)
        submission.close()
        assert (dropped, loop.cancelled) == (["choice 0", "choice 1"], 1)


async def test_a_full_queue_refuses_with_429_and_a_time_and_takes_others_when_there_is_room(
    tiny_pair,
):
    service = service_of(Engine(tiny_pair, CHAIN, slots=1), queue=2)
    body = {"prompt": "def main(", "max_tokens": 40, "ignore_eos": True, "temperature": 0}

    async with client_of(service) as http:
        first = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(8)))
        served = [answer for answer in first if answer.status_code == 200]
        refused = [answer for answer in first if answer.status_code == 429]
        assert (len(served), len(refused)) == (3, 5)
        for answer in refused:
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        later = await http.post("/v1/completions", json=body)
        texts = {answer.json()["choices"][0]["text"] for answer in (*served, later)}
        assert len(texts) == 1
        health = (await http.get("/health")).json()
        assert (health["running"], health["queue"], health["cancelled"]) == (0, 2, 0)


async def test_a_small_cache_preempts_and_refuses_at_once_what_never_fits(tiny_pair):
    limits = Limits(4, step_tokens=32, cache_tokens=256)
    service = service_of(Engine(tiny_pair, CHAIN, limits=limits))
    body = {"max_tokens": 90, "ignore_eos": True, "temperature": 0}
    prompts = ["def main(", "class A:", "import os", "x = 1"]

    async with client_of(service) as http:
        never = await http.post("/v1/completions", json={**body, "prompt": [5] * 150})
        assert never.status_code == 400
        assert "the context holds 192 tokens here" in never.json()["error"]["message"]
        answers = await asyncio.gather(
            *(http.post("/v1/completions", json={**body, "prompt": p}) for p in prompts)
        )
        health = (await http.get("/health")).json()
        assert health["preemptions"] > 0
        assert health["waiting"] == 0
        for prompt, answer in zip(prompts, answers, strict=True):
            alone = await http.post("/v1/completions", json={**body, "prompt": prompt})
            assert answer.json()["choices"] == alone.json()["choices"]


async def test_an_answer_without_a_number_has_the_room_that_the_cache_has(chat_pair):
    limits = Limits(2, cache_tokens=192)
    service = service_of(Engine(chat_pair, CHAIN, limits=limits))
    chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}

    async with client_of(service) as http:
        answer = await http.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 200, answer.text
        (card,) = (await http.get("/v1/models")).json()["data"]
        assert answer.json()["usage"]["total_tokens"] == card["max_model_len"] == 128
    with pytest.raises(UserError, match="a cache of 100 tokens holds no request: it needs 128"):
        Engine(chat_pair, limits=Limits(2, cache_tokens=100))


async def test_the_next_turn_of_a_chat_says_how_much_of_it_was_in_the_cache(tiny_pair):
    limits = Limits(2, share_prefixes=True)
    service = service_of(Engine(tiny_pair, CHAIN, limits=limits))
    body = {"max_tokens": 9, "ignore_eos": True, "temperature": 0}

    async with client_of(service) as http:
        turn = [*range(5, 30)]
        for _ in range(2):
            answer = await http.post("/v1/completions", json={**body, "prompt": turn})
            turn = [*turn, *range(40, 44)]
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 25
        health = (await http.get("/health")).json()
        assert (health["prefix_hits"], health["prefix_tokens"]) == (1, 25)


async def test_a_request_with_many_prompts_is_taken_whole_where_there_is_room_for_one(tiny_pair):
    service = service_of(Engine(tiny_pair, CHAIN, slots=1), queue=1)

    async with client_of(service) as http:
        body = {"prompt": ["def f(", "class A:", "import", "x ="], "max_tokens": 4}
        answer = await http.post("/v1/completions", json=body)
        assert (answer.status_code, len(answer.json()["choices"])) == (200, 4)


LIMITS = Limits(3, step_tokens=32, share_prefixes=True)


@pytest.fixture(scope="module")
def engine_process(tiny_spec):
    engine_process = EngineProcess(tiny_spec, BANDIT, LIMITS, [max(os.sched_getaffinity(0))])
    yield engine_process
    engine_process.close()
    assert engine_process._process.poll() == 0, "it did not end by itself"


def test_it_answers_as_an_engine_here_does(engine_process, tiny_pair):
    prompts = ["def main(", "class A:", "import os", "x = 1", "y = 2"]
    engine = Engine(tiny_pair, BANDIT, limits=LIMITS)
    asked = [Request(p, engine.encode(p), 20, seed=n) for n, p in enumerate(prompts)]
    expected = [g.tokens for g in engine.generate(asked)]
    for request in asked:
        engine_process.add(request)
    answered: dict[str, list[int]] = {}
    while not engine_process.idle:
        answered |= {c.request_id: c.finished.tokens for c in engine_process.step() if c.finished}
    assert [answered[prompt] for prompt in prompts] == expected
    assert sum(arm["rounds"] for arm in engine_process.learned.rows()) > 0
    with pytest.raises(UserError, match="the prompt is empty"):
        engine_process.add(Request("empty", (), 4))
    assert engine_process.idle


def test_only_the_engines_process_is_bound_to_its_cores(engine_process):
    cores = os.sched_getaffinity(0)
    assert os.sched_getaffinity(engine_process._process.pid) == {max(cores)}


def test_nothing_takes_of_the_cache_once_the_last_client_has_left(engine_process):
    engine_process.add(Request("left", tuple(range(5, 25)), 200, ignore_eos=True))
    while not engine_process.step():
        pass
    assert engine_process.status().cache_usage > 0
    engine_process.cancel("left")
    assert engine_process.status().cache_usage == engine_process.status().waiting == 0


async def test_clients_that_leave_stop_nobody_else(engine_process):
    """Also while the engine's thread waits for a step that will not come."""
    service = service_of(engine_process)
    async with service.fleet:
        for n in range(4):
            left = Request(f"left {n}", (5, 6, 7), 200, ignore_eos=True)
            submission = await service.fleet.submit([left])
            if n % 2:
                async for _ in submission:
                    break
            submission.close()
        # Asked on the engine's thread, which must not wait for the requests that have left.
        assert (await service.health()).arms
        last = await service.fleet.submit([Request("last", (5, 6), 3, ignore_eos=True)])
        assert [chunk async for _, chunk in last][-1].finished
        assert service.fleet.running == 0
        assert service.fleet.cancelled == 4


async def test_those_that_left_while_waiting_do_not_fill_the_queue(engine_process):
    service = service_of(engine_process, queue=2)

    async with service.fleet:
        for n in range(3):
            many = [Request(f"{n}.{i}", (5, 6, 7), 200, ignore_eos=True) for i in range(9)]
            submission = await service.fleet.submit(many)
            async for _ in submission:
                break
            submission.close()
            assert service.fleet.waiting == 0
        last = await service.fleet.submit([Request("last", (5, 6), 3, ignore_eos=True)])
        assert [chunk async for _, chunk in last][-1].finished


def test_weights_that_cannot_be_loaded_are_said_in_the_same_line(
    tiny_spec, tiny_pair_folders, tmp_path
):
    broken = Path(shutil.copytree(tiny_pair_folders["target"], tmp_path / "broken"))
    (broken / "model.safetensors").unlink()
    (broken / "pytorch_model.bin").write_bytes(b"")
    spec = tiny_spec.model_copy(update={"target": str(broken)})
    said = []
    for start in (load_pair, lambda spec: EngineProcess(spec, Configuration(), LIMITS)):
        with pytest.raises(UserError, match="cannot load its weights") as error:
            start(spec)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_whatever_ends_its_start_is_said(tiny_spec):
    with pytest.raises(RuntimeError, match=r"the engine did not start: .*Invalid argument"):
        EngineProcess(tiny_spec, Configuration(), LIMITS, cores=[1000])


LONG = Request("long", (5, 6, 7), 200, ignore_eos=True)


async def killed(service, signal):
    """The tokens of an answer while which the engine's process gets this signal."""
    tokens: list[int] = []
    async for _, chunk in await service.submit([LONG]):
        if not tokens:
            os.kill(service.engine._process.pid, signal)
        tokens += chunk.tokens
    return tokens


@pytest.mark.long
async def test_engines_that_hang_or_fail_are_replaced_by_others_ever_later(
    tiny_spec, tiny_pair, monkeypatch
):
    monkeypatch.setattr(replica, "AT_ONCE", 600.0)  # a busy machine is slow
    engine = EngineProcess(tiny_spec, Configuration(), LIMITS, patience=4)
    service = service_of(engine)
    pauses = []
    [only] = service.fleet.replicas
    for only.failing in range(10):
        pauses.append(only.pause)
    assert pauses == [0, 0, 0, 1, 2, 4, 8, 16, 32, 60]
    only.failing = 0
    [alone] = Engine(tiny_pair, limits=LIMITS).generate([LONG])

    async with client_of(service) as http:
        assert await killed(service, signal.SIGSTOP) == list(alone.tokens)
        assert (service.fleet.restarts, engine.alive) == (1, False)
        only.failing = 2
        assert await killed(service, signal.SIGKILL) == list(alone.tokens)  # after a pause
        assert only.failing == 3
        service.engine._process.kill()
        while (await http.get("/ready")).status_code == 200:
            await asyncio.sleep(0.01)
        with pytest.raises(ApiError, match="no engine answers") as refused:
            await service.submit([LONG])
        assert refused.value.status == 503
        while (await http.get("/ready")).status_code == 503:
            await asyncio.sleep(0.01)
        assert service.fleet.restarts == 3
