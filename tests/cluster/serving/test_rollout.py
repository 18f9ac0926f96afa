"""The configuration is replaced, and an engine that dies, without a client noticing."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.serving import deployment, rollout
from cluster.serving.canary import Canary
from cluster.serving.engine_loop import EngineFailed, EngineLoop, LoopObserver
from cluster.serving.engine_process import EngineProcess
from cluster.serving.http.service import CompletionService
from cluster.serving.served import NOT_OPERATED, Deployment, Operation, Served
from cluster.serving.stream import Stream, Submitted
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, Configuration, PairSpec, Sampling
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.drafting.trained import weights_here
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import Pair, load_pair
from tests.conftest import tiny_llama, tiny_tokenizer

CHAIN = Configuration(drafter=DraftModelSettings(policy=FixedSettings(max_tokens=4)))
LOOKUP = Configuration(drafter=PromptLookupSettings())
LIMITS = Limits(4, share_prefixes=True)
COUPLED = Sampling(temperature=0.9, coupling="gumbel")
PROMPTS = ("def main(", "class A:", "import os", "x = 1")


def requests(pair: Pair, name: str, tokens: int = 200) -> list[Request]:
    """Of a greedy text and a coupled one for each prompt."""
    prompts = [tuple(pair.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    return [
        Request(f"{name} {n} {rule}", prompt, tokens, sampling, seed=n, ignore_eos=True)
        for n, prompt in enumerate(prompts)
        for rule, sampling in (("greedy", Sampling()), ("coupled", COUPLED))
    ]


@pytest.fixture(scope="module")
def expected(tiny_pair: Pair) -> list[str]:
    """The texts that the target alone writes."""
    engine = Engine(tiny_pair, AUTOREGRESSIVE, slots=4)
    return [g.text for g in engine.generate(requests(tiny_pair, "expected"))]


async def text(stream: Stream) -> str:
    """What a client of one request is sent, which must be its text."""
    sent, whole = "", ""
    async for _, chunk in stream:
        sent += chunk.text
        if chunk.finished:
            whole = chunk.finished.text
            generation = chunk.finished
            assert len(generation.tokens) == len(generation.origins)
            assert sum(r.generated for r in generation.rounds) == len(generation.tokens)
    assert sent == whole
    return sent


def told(
    spec: PairSpec,
    story: Callable[[CompletionService], Awaitable[None]],
    operation: Operation = NOT_OPERATED,
    seconds: float = 300,
) -> None:
    """Serve while a story is told."""
    engine = EngineProcess(spec, CHAIN, LIMITS)
    service = CompletionService(engine, "tiny", operation=operation)

    async def main() -> None:
        async with service.loop:
            await story(service)

    try:
        asyncio.run(asyncio.wait_for(main(), timeout=seconds))
    finally:
        service.close()


def kill(engine: Engine | EngineProcess) -> None:
    assert isinstance(engine, EngineProcess)
    os.kill(engine._process.pid, signal.SIGKILL)


async def switched(
    service: CompletionService, pair: Pair, expected: list[str], others: list[Configuration]
) -> int:
    """Deploy each of `others` while eight clients keep asking; returns how many were answered, all
    of them rightly."""
    done, answered = False, 0

    async def client(number: int) -> None:
        nonlocal answered
        while not done:
            request = requests(pair, f"{answered} {number}")[number]
            assert await text(await service.submit([request])) == expected[number]
            answered += 1

    clients = asyncio.gather(*map(client, range(len(expected))))
    for configuration in others:
        pair_spec = service.loop.current.deployment.pair
        await service.loop.deploy(Deployment(pair=pair_spec, configuration=configuration))
        assert service.engine.configuration == configuration
    done = True
    await clients
    while service.loop._draining:
        await asyncio.sleep(0.01)
    assert service.loop.running == service.loop.cancelled == 0
    return answered


async def survived(service: CompletionService, pair: Pair, expected: list[str]) -> None:
    """Eight streams, in which the engine is killed."""
    streams = [await service.submit([r]) for r in requests(pair, "killed")]
    running = asyncio.gather(*map(text, streams))
    while not all(answer.sent > 20 for stream in streams[:4] for answer in stream._answers):
        await asyncio.sleep(0.001)
    kill(service.engine)
    assert await running == expected
    health = await service.health()
    assert (health.ready, health.restarts, health.cancelled) == (True, 1, 0)
    assert health.configuration == CHAIN.id


def engines() -> set[int]:
    """The processes of this one's engines."""
    found = set()
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            if "engine_process" in " ".join(child.cmdline()):
                found.add(child.pid)
    return found


async def left(service: CompletionService, pair: Pair, expected: list[str]) -> None:
    """A client that leaves while an engine is loaded stops it for nobody else, and leaves none."""
    before, [first, other] = service.loop.restarts, requests(pair, "left")[:2]
    kill(service.engine)
    assert isinstance(service.engine, EngineProcess)
    service.engine._process.wait()
    leaving = asyncio.create_task(service.submit([other]))
    while not service.loop._changing.locked():
        await asyncio.sleep(0.001)
    staying = asyncio.create_task(service.submit([first]))
    await asyncio.sleep(0.1)
    leaving.cancel()
    assert await text(await staying) == expected[0]
    assert service.loop.restarts == before + 1
    [running] = engines()
    deployment = Deployment(pair=service.loop.current.deployment.pair, configuration=LOOKUP)
    deploying = asyncio.create_task(service.loop.deploy(deployment))
    while len(engines()) < 2:
        await asyncio.sleep(0.01)
    deploying.cancel()
    await asyncio.wait([deploying])
    async with asyncio.timeout(60):
        while engines() != {running}:
            await asyncio.sleep(0.05)
    assert service.loop.switches == 0


async def looked_after(service: CompletionService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the engine that fails is not the last one."""
    looks = 0

    async def fails() -> None:
        nonlocal looks
        looks += 1
        raise OSError("no look")

    with monkeypatch.context() as patch:
        patch.setattr(rollout, "_WATCH", 0.01)
        patch.setattr(service.loop, "working", fails)
        async with asyncio.timeout(10):
            while looks < 2:
                await asyncio.sleep(0.01)


def too_many_files(*_: object) -> EngineProcess:
    """No engine can be started."""
    raise OSError("too many open files")


async def refused(
    service: CompletionService, spec: PairSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be served leaves everything as it is."""
    before = service.loop.current
    unknown = Configuration(drafter=DraftModelSettings(draft="nobody"))
    with pytest.raises(UserError, match="needs draft 'nobody'"):
        await service.loop.deploy(Deployment(pair=spec, configuration=unknown))
    beside = Configuration.model_validate({"drafter": {"kind": "pearl"}})
    for order in (service.loop.deploy, partial(service.loop.try_out, share=0.5)):
        with pytest.raises(UserError, match="specdec serve --cluster PLACEMENT"):
            await order(Deployment(pair=spec, configuration=beside))
    other = spec.model_copy(update={"target": "elsewhere/other"})
    with pytest.raises(UserError, match="another target writes other texts"):
        await service.loop.deploy(Deployment(pair=other, configuration=CHAIN))
    with monkeypatch.context() as patch:
        patch.setattr(service.engine, "another", too_many_files)
        for order in (service.loop.deploy, partial(service.loop.try_out, share=0.5)):
            with pytest.raises(UserError, match="did not start: too many open files"):
                await order(Deployment(pair=spec, configuration=CHAIN))
    assert service.loop.current is before


async def tried_out(service: CompletionService, pair: Pair, expected: list[str]) -> None:
    """A challenger gets half of the traffic, and is promoted."""
    spec = service.loop.current.deployment.pair
    champion = service.loop.current
    challenger = await service.loop.try_out(Deployment(pair=spec, configuration=CHAIN), 0.5)
    served = set()
    for number in range(20):
        stream = await service.submit([requests(pair, f"canary {number}")[number % 8]])
        served.add(stream._served)
        assert await text(stream) == expected[number % 8]
    assert served == {champion, challenger}
    canary = service.loop.canary
    assert canary is not None
    state = (await service.health()).canary
    assert state is not None
    assert (state.state, state.pairs) == ("running", 2)
    canary.end("promoted", "the test says so")
    (last,) = requests(pair, "promoted")[:1]
    assert await text(await service.submit([last])) == expected[0]
    assert service.loop.current is challenger
    assert (await service.health()).configuration == CHAIN.id


async def broken(service: CompletionService, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine dies, and cannot be started again."""
    monkeypatch.setattr(service.engine, "another", too_many_files)
    stream = await service.submit([Request("r", (5, 6, 7), 200, ignore_eos=True)])
    kill(service.engine)
    with pytest.raises(EngineFailed, match="too many open files"):
        await text(stream)
    assert not (await service.health()).ready
    with pytest.raises(EngineFailed):
        service.loop.check()  # so that Ray Serve replaces the replica


class Servers:
    """Two servers, the second of which goes on where the first one has failed."""

    def __init__(self, first: CompletionService, second: CompletionService) -> None:
        self.first, self.second, self.observer = first, second, LoopObserver()

    async def submit(self, request: Request) -> Stream[CompletionService]:
        return Stream(self, self.first, [request], await self.first.loop.submit([request]))

    async def go_on(
        self, failed: CompletionService, requests: Sequence[Request]
    ) -> tuple[CompletionService, Submitted]:
        assert failed is self.first
        return self.second, await self.second.loop.submit(requests, begun=True)

    def finished(self, request_id: str, generation: object) -> None: ...

    def left(self, request_id: str) -> None: ...


def test_another_server_goes_on_with_the_same_text(tiny_pair: Pair, expected: list[str]) -> None:
    """Twice: the second one's engine fails, too, and is replaced."""
    first, second = (CompletionService(Engine(tiny_pair, CHAIN, 8), "tiny") for _ in range(2))
    third = CompletionService(Engine(tiny_pair, LOOKUP, 8), "tiny")

    async def main() -> None:
        async with first.loop, second.loop, third.loop:
            servers = Servers(first, second)
            streams = [await servers.submit(r) for r in requests(tiny_pair, "moved")]
            running = asyncio.gather(*map(text, streams))
            while not all(answer.sent > 20 for s in streams for answer in s._answers):
                await asyncio.sleep(0.001)
            first.loop.current.loop._fail("killed")
            while not all(len(answer.tokens) > 60 for s in streams for answer in s._answers):
                await asyncio.sleep(0.001)
            # What a server does where its engine has died: another one of its own goes on.
            failed = second.loop.current
            second.loop._switch(third.loop.current)
            failed.loop._fail("killed")
            assert await running == expected
            assert second.loop.running == third.loop.running == 0
        assert "specdec" in second.metrics.page()[0].decode()

    asyncio.run(asyncio.wait_for(main(), timeout=120))


def test_streams_outlive_a_killed_engine_and_a_new_configuration(
    tiny_spec: PairSpec,
    tiny_pair: Pair,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One story, because an engine's start takes seconds."""
    operation = Operation(None, tmp_path / "deployed")

    async def story(service: CompletionService) -> None:
        await survived(service, tiny_pair, expected)
        await left(service, tiny_pair, expected)
        await looked_after(service, monkeypatch)
        old = service.engine
        assert await switched(service, tiny_pair, expected, [LOOKUP]) >= len(expected)
        assert isinstance(old, EngineProcess)
        assert not old.alive
        assert service.loop.previous is not None
        assert service.loop.previous.configuration == CHAIN
        await refused(service, tiny_spec, monkeypatch)
        health = await service.health()
        assert (health.configuration, health.switches) == (LOOKUP.id, 1)
        kept = operation.last()  # what a replica that is started again serves
        assert kept is not None
        assert kept.configuration == LOOKUP
        await broken(service, monkeypatch)

    told(tiny_spec, story, operation)


def trying(service: CompletionService, pair: Pair) -> Canary:
    """A challenger gets half of the traffic, from an engine in this process."""
    challenger = CompletionService(Engine(pair, LOOKUP), "tiny").loop.current
    challenger.loop.open()
    loop = service.loop
    loop._beside.append(challenger)
    loop.canary = Canary(loop.current, challenger, 0.5)
    return loop.canary


def told_here(
    pair: Pair,
    story: Callable[[CompletionService], Awaitable[None]],
    operation: Operation = NOT_OPERATED,
) -> None:
    """Serve by an engine in this process, which is not replaced, while a story is told."""
    service = CompletionService(Engine(pair, CHAIN), "tiny", operation=operation)

    async def main() -> None:
        async with service.loop:
            await story(service)

    asyncio.run(asyncio.wait_for(main(), timeout=60))


def test_what_is_served_already_is_not_loaded_again(tiny_pair: Pair, tmp_path: Path) -> None:
    """A rollback still returns to what was served before it."""
    operation = Operation(None, tmp_path / "deployed")
    again = Deployment(
        pair=tiny_pair.spec, configuration=CHAIN, source="version 2", version=2, certificate="sure"
    )

    async def story(service: CompletionService) -> None:
        loop, served = service.loop, service.loop.current
        before = loop.previous = Deployment(pair=tiny_pair.spec, configuration=LOOKUP)
        for order in (loop.deploy, loop.settle):
            canary = trying(service, tiny_pair)
            await order(again)
            assert canary.state == "dropped"
        assert loop.current is served
        assert (loop.previous, loop.switches) == (before, 0)
        health = await service.health()
        assert (health.source, health.version, health.certified) == ("version 2", 2, True)
        assert operation.last() == again

    told_here(tiny_pair, story, operation)


@pytest.fixture
def copied(tiny_spec: PairSpec, tmp_path: Path) -> PairSpec:
    """The tiny pair with a draft that may be trained on."""
    folder = shutil.copytree(tiny_spec.drafts["draft"], tmp_path / "draft")
    return tiny_spec.model_copy(update={"drafts": {"draft": str(folder)}})


def train_on(spec: PairSpec) -> None:
    """The draft's folder has other weights from now on."""
    tiny_llama(7, 32, 2, vocab=len(tiny_tokenizer())).save_pretrained(spec.drafts["draft"])


async def loaded_here(served: Served, deployment: Deployment) -> Served:
    """Instead of :meth:`Served.beside`, in this process."""
    engine = Engine(load_pair(deployment.pair), deployment.configuration)
    other = Served(EngineLoop(engine, served.loop.queue), deployment)
    other.loop.open()
    return other


def deployed(spec: PairSpec, configuration: Configuration, **said: object) -> Deployment:
    """As `specdec deploy` makes it."""
    weights = weights_here(spec, [configuration])
    return Deployment(pair=spec, configuration=configuration, weights=weights, **said)


def test_weights_that_were_trained_anew_are_loaded_under_the_same_names(
    copied: PairSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Served, "beside", loaded_here)
    first = deployed(copied, CHAIN, certificate="sure")
    engine = Engine(load_pair(copied), CHAIN)

    async def story(service: CompletionService) -> None:
        loop, served = service.loop, service.loop.current
        assert await loop.deploy(first) is served
        train_on(copied)
        again = deployed(copied, CHAIN)
        trained = await loop.deploy(again)
        assert trained is loop.current is not served
        draft = trained.loop.engine.pair.fingerprints["draft"]
        assert draft == (again.weights or {})["draft"] != (first.weights or {})["draft"]
        assert (await service.health()).certified is False
        assert await loop.deploy(again) is trained
        with pytest.raises(UserError, match="nothing else was served before"):
            await loop.roll_back()  # what was there is overwritten

    service = CompletionService(engine, "tiny", deployment=first)

    async def main() -> None:
        async with service.loop:
            await story(service)

    asyncio.run(asyncio.wait_for(main(), timeout=60))


def test_a_rollback_to_weights_that_are_others_now_is_not_certified(
    copied: PairSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Served, "beside", loaded_here)
    first = deployed(copied, CHAIN, certificate="sure")
    service = CompletionService(Engine(load_pair(copied), CHAIN), "tiny", deployment=first)

    async def main() -> None:
        async with service.loop:
            await service.loop.deploy(deployed(copied, LOOKUP))
            assert (await service.loop.roll_back()).deployment == first
            await service.loop.roll_back()
            train_on(copied)
            back = (await service.loop.roll_back()).deployment
            assert back == deployed(copied, CHAIN)
            assert back.certificate is None
            weights = {**(back.weights or {}), "target": "0"}
            with pytest.raises(UserError, match="has other weights than those that are served"):
                await service.loop.deploy(back.model_copy(update={"weights": weights}))

    asyncio.run(asyncio.wait_for(main(), timeout=60))


def test_a_server_starts_with_the_digests_of_its_weights(
    copied: PairSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_bound", lambda start, *_: start)
    start: Any = deployment.application(copied, CHAIN)
    assert start.deployment().weights == weights_here(copied, [CHAIN])
    assert {"target", "draft"} == start.weights.keys()


def test_a_rollback_ends_the_first_canary(tiny_pair: Pair) -> None:
    async def story(service: CompletionService) -> None:
        canary, served = trying(service, tiny_pair), service.loop.current
        assert await service.loop.roll_back() is served
        assert canary.state == "dropped"
        with pytest.raises(UserError, match="nothing else was served before"):
            await service.loop.roll_back()

    told_here(tiny_pair, story)


def test_a_rollback_waits_for_what_is_being_deployed(tiny_pair: Pair) -> None:
    """It returns to what was served before that."""

    async def story(service: CompletionService) -> None:
        loop = service.loop
        async with loop._changing:
            rolling = asyncio.create_task(loop.roll_back())
            await asyncio.sleep(0.01)
            loop.previous = loop.current.deployment
        assert await rolling is loop.current

    told_here(tiny_pair, story)


def test_a_deployment_that_fails_leaves_the_canary_running(tiny_pair: Pair) -> None:
    wanted = Deployment(pair=tiny_pair.spec, configuration=AUTOREGRESSIVE)

    async def story(service: CompletionService) -> None:
        canary = trying(service, tiny_pair)
        for order in (service.loop.deploy, partial(service.loop.try_out, share=0.5)):
            with pytest.raises(UserError, match="is not replaced while it serves"):
                await order(wanted)
        assert canary.state == "running"
        assert service.loop._trying is canary

    told_here(tiny_pair, story)


def test_no_client_waits_for_a_load_where_a_canary_is_decided_meanwhile(tiny_pair: Pair) -> None:
    async def story(service: CompletionService) -> None:
        canary, champion = trying(service, tiny_pair), service.loop.current
        first, second = requests(tiny_pair, "meanwhile", 4)[:2]
        async with service.loop._changing, asyncio.timeout(20):
            canary.end("promoted", "the test says so")
            stream = await service.submit([first])
            assert stream._served is champion
            await text(stream)
        await text(await service.submit([second]))
        assert service.loop.current is canary.sides["challenger"]

    told_here(tiny_pair, story)


def test_what_cannot_be_written_down_is_served_all_the_same(
    tiny_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    again = Deployment(pair=tiny_pair.spec, configuration=CHAIN, version=2)

    async def story(service: CompletionService) -> None:
        await service.loop.deploy(again)
        assert service.loop.current.deployment == again

    told_here(tiny_pair, story, Operation(None, tmp_path / "file" / "deployed"))
    assert "is not remembered" in caplog.text


@pytest.mark.long
def test_twenty_switches_under_load_change_no_text(
    tiny_spec: PairSpec, tiny_pair: Pair, expected: list[str]
) -> None:
    async def story(service: CompletionService) -> None:
        answered = await switched(service, tiny_pair, expected, [LOOKUP, CHAIN] * 10)
        assert service.loop.switches == 20
        assert answered > 20
        assert (await service.loop.roll_back()).deployment.configuration == LOOKUP
        await tried_out(service, tiny_pair, expected)
        kill(service.engine)  # while nobody waits for it
        while service.loop.restarts < 1:
            await asyncio.sleep(0.05)
        (first,) = requests(tiny_pair, "later")[:1]
        assert await text(await service.submit([first])) == expected[0]

    told(tiny_spec, story, seconds=1800)
