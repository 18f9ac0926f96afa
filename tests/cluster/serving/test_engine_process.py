"""An engine in a process of its own answers as one in this process does, and never leaves it
waiting."""

import asyncio
import os
import shutil
import signal
from pathlib import Path
from time import sleep

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
from tests.cluster.serving.http.events import client_of
from tests.configurations import BANDIT
from tests.local_server import service_of

LIMITS = Limits(3, step_tokens=32, share_prefixes=True)


@pytest.fixture(scope="module")
def engine(tiny_spec):
    engine = EngineProcess(tiny_spec, BANDIT, LIMITS)
    yield engine
    engine.close()
    assert engine._process.poll() == 0, "it did not end by itself"


def test_it_answers_as_an_engine_here_does(engine, tiny_pair):
    prompts = ["def main(", "class A:", "import os", "x = 1", "y = 2"]
    asked = [Request(p, engine.encode(p), 20, seed=n) for n, p in enumerate(prompts)]
    expected = [g.tokens for g in Engine(tiny_pair, BANDIT, limits=LIMITS).generate(asked)]
    for request in asked:
        engine.add(request)
    answered: dict[str, list[int]] = {}
    while not engine.idle:
        answered |= {c.request_id: c.finished.tokens for c in engine.step() if c.finished}
    assert [answered[prompt] for prompt in prompts] == expected
    assert sum(arm["rounds"] for arm in engine.learned.rows()) > 0
    with pytest.raises(UserError, match="the prompt is empty"):
        engine.add(Request("empty", (), 4))
    assert engine.idle


def test_nothing_takes_of_the_cache_once_the_last_client_has_left(engine):
    engine.add(Request("left", tuple(range(5, 25)), 200, ignore_eos=True))
    while not engine.step():
        pass
    assert engine.status().cache_usage > 0
    engine.cancel("left")
    assert engine.status().cache_usage == engine.status().waiting == 0


async def test_clients_that_leave_stop_nobody_else(engine):
    """Also while the engine's thread waits for a step that will not come."""
    service = service_of(engine)
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


async def test_those_that_left_while_waiting_do_not_fill_the_queue(engine):
    service = service_of(engine, queue=2)

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


async def test_an_engine_in_this_process_that_hangs_is_broken(tiny_pair):
    engine = Engine(tiny_pair)
    engine.step = lambda: sleep(2) or []

    async with EngineLoop(engine, patience=0.1) as loop:
        submission = await loop.submit([LONG])
        while loop.works:
            await asyncio.sleep(0.01)
        assert "a step takes longer than 0.1 s" in str(await submission.chunks.get())
