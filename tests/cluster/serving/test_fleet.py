"""Configurations are replaced, and engines that fail, without a change in any client's output."""

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from cluster.serving import engine_fleet
from cluster.serving.canary import Canary
from cluster.serving.engine_fleet import EngineFleet
from cluster.serving.engine_loop import EngineFailed, QueueFull
from cluster.serving.engine_process import EngineProcess
from cluster.serving.http.service import Service
from cluster.serving.served import NOT_OPERATED, Deployment, Operation, ServedEngine
from cluster.serving.start import Start
from cluster.serving.stream import _StreamedAnswer
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, Configuration, Sampling
from specdec_core.drafting.trained import weights_here
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import load_pair
from tests.commands import children
from tests.configurations import BANDIT, FOUR, LOOKUP, drafting
from tests.conftest import tiny_llama, tiny_tokenizer
from tests.local_server import served_of, service_of

UNKNOWN = drafting("draft_model", draft="nobody")
LIMITS = Limits(4, share_prefixes=True)
COUPLED = Sampling(temperature=0.9, coupling="gumbel")
PROMPTS = ("def main(", "class A:", "import os", "x = 1")


def requests(pair, name, tokens=120):
    """A greedy and a coupled request for each prompt."""
    prompts = [tuple(pair.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    return [
        Request(f"{name} {n} {rule}", prompt, tokens, sampling, seed=n, ignore_eos=True)
        for n, prompt in enumerate(prompts)
        for rule, sampling in (("greedy", Sampling()), ("coupled", COUPLED))
    ]


@pytest.fixture(scope="module")
def expected(tiny_pair):
    """The texts that the target alone writes."""
    engine = Engine(tiny_pair, AUTOREGRESSIVE, slots=4)
    return [g.text for g in engine.generate(requests(tiny_pair, "expected"))]


async def text(stream):
    """What a client of one request receives, which must be the request's whole text."""
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


def here(pair, configurations=(FOUR,), operation=NOT_OPERATED, slots=8, queue=128):
    """A fleet of engines in threads of this process, one for each configuration."""
    served = [served_of(Engine(pair, each, slots), queue) for each in configurations]
    return EngineFleet(served, operation)


def kill(served):
    process = served.loop.engine._process
    process.kill()
    process.wait(10)


async def sent(streams, characters):
    """Wait until each stream has sent more than this."""
    answers = [answer for stream in streams for answer in stream._unfinished.values()]
    while not all(answer.sent > characters for answer in answers):
        await asyncio.sleep(0.001)


async def drained(fleet):
    while any(replica._draining for replica in fleet.replicas):
        await asyncio.sleep(0.01)


# Engines in processes of their own.


async def switched(fleet, pair, expected, others):
    """Deploy each of `others` while eight clients keep asking; returns the number of answers, of
    which all have the expected text."""
    done, answered = False, 0

    async def client(number):
        nonlocal answered
        while not done:
            request = requests(pair, f"{answered} {number}")[number]
            assert await text(await fleet.submit([request])) == expected[number]
            answered += 1

    clients = asyncio.gather(*map(client, range(len(expected))))
    for configuration in others:
        deployment = fleet.deployment.model_copy(update={"configuration": configuration})
        assert await fleet.deploy(deployment) == fleet.deployment == deployment
        assert {r.served.loop.engine.configuration for r in fleet.replicas} == {configuration}
    done = True
    await clients
    await drained(fleet)
    assert fleet.running == fleet.cancelled == 0
    return answered


async def survived(fleet, pair, expected):
    """An engine is killed while it answers eight streams."""
    before = fleet.restarts
    streams = [await fleet.submit([r]) for r in requests(pair, f"killed {before}")]
    running = asyncio.gather(*map(text, streams))
    await sent(streams[:4], 20)
    kill(fleet.replicas[0].served)
    assert await running == expected
    while fleet.restarts == before:
        await asyncio.sleep(0.01)
    assert fleet.failure is None
    assert fleet.cancelled == 0
    assert fleet.deployment.configuration == FOUR


def engines():
    """The processes of this process's engines."""
    return {process.pid for process in children("engine_main", recursive=False)}


async def left(fleet, pair, expected):
    """An engine is killed while it answers eight streams. A client that leaves while another engine
    is loaded does not stop that for the other clients, and leaves no process behind."""
    before, [first, other] = fleet.restarts, requests(pair, "left")[:2]
    streams = [await fleet.submit([r]) for r in requests(pair, "killed")]
    answering = asyncio.gather(*map(text, streams))
    await sent(streams[:4], 20)
    kill(fleet.replicas[0].served)
    leaving = asyncio.create_task(fleet.submit([other]))
    while not fleet._loading:
        await asyncio.sleep(0.001)
    staying = asyncio.create_task(fleet.submit([first]))
    await asyncio.sleep(0.1)
    leaving.cancel()
    assert await answering == expected
    assert await text(await staying) == expected[0]
    assert fleet.restarts == before + 1
    await drained(fleet)
    [running] = engines()
    deployment = fleet.deployment.model_copy(update={"configuration": LOOKUP})
    deploying = asyncio.create_task(fleet.deploy(deployment))
    while len(engines()) < 2:
        await asyncio.sleep(0.01)
    deploying.cancel()
    await asyncio.wait([deploying])
    while engines() != {running}:
        await asyncio.sleep(0.05)
    assert fleet.switches == 0


def too_many_files(*_):
    """No engine can be started."""
    raise OSError("too many open files")


async def refused(fleet, monkeypatch):
    """What cannot be served leaves everything as it is."""
    served, before = fleet.replicas[0].served, fleet.deployment
    beside = Configuration.model_validate({"drafter": {"kind": "pearl"}})
    elsewhere = before.pair.model_copy(update={"target": "elsewhere/other"})
    for update, message in (
        ({"configuration": UNKNOWN}, "the pair has no draft 'nobody'"),
        ({"configuration": beside}, "specdec serve --cluster PLACEMENT"),
        ({"pair": elsewhere}, "another target writes other texts"),
    ):
        for order in (fleet.deploy, partial(fleet.try_out, share=0.5)):
            with pytest.raises(UserError, match=message):
                await order(before.model_copy(update=update))
    with monkeypatch.context() as patch:
        patch.setattr(fleet.replicas[0].served.loop.engine, "another", too_many_files)
        wanted = before.model_copy(update={"configuration": FOUR})
        for order in (fleet.deploy, partial(fleet.try_out, share=0.5)):
            with pytest.raises(UserError, match="did not start: too many open files"):
                await order(wanted)
    assert fleet.replicas[0].served is served
    assert fleet.deployment is before


async def broken(fleet, monkeypatch):
    """An engine dies, and cannot be started again."""
    monkeypatch.setattr(fleet.replicas[0].served.loop.engine, "another", too_many_files)
    stream = await fleet.submit([Request("r", (5, 6, 7), 200, ignore_eos=True)])
    kill(fleet.replicas[0].served)
    with pytest.raises(EngineFailed, match="too many open files"):
        await text(stream)
    assert not fleet.accepting
    with pytest.raises(EngineFailed):
        fleet.check()  # so that Ray Serve replaces the server


async def test_streams_survive_a_killed_engine_and_a_new_configuration(
    tiny_spec, tiny_pair, expected, monkeypatch, tmp_path
):
    """One story, because an engine's start takes seconds."""
    operation = Operation(None, tmp_path / "deployed")
    service = service_of(EngineProcess(tiny_spec, FOUR, LIMITS), operation=operation)
    fleet = service.fleet
    async with service.running():
        await left(fleet, tiny_pair, expected)
        old = fleet.replicas[0].served.loop.engine
        assert await switched(fleet, tiny_pair, expected, [LOOKUP]) >= len(expected)
        assert not old.alive
        assert fleet.previous.configuration == FOUR
        await refused(fleet, monkeypatch)
        assert fleet.switches == 1
        # What a server that is started again serves.
        assert operation.last().configuration == LOOKUP
        await broken(fleet, monkeypatch)


@pytest.mark.long
async def test_two_replicas_survive_kills_and_twenty_switches_under_load(
    tiny_spec, tiny_pair, expected
):
    fleet = EngineFleet([served_of(EngineProcess(tiny_spec, FOUR, LIMITS)) for _ in range(2)])
    async with Service(fleet, "tiny").running():
        await survived(fleet, tiny_pair, expected)
        assert fleet.resumed > 0
        answered = await switched(fleet, tiny_pair, expected, [LOOKUP, FOUR] * 10)
        assert fleet.switches == 20
        assert answered > 20
        assert (await fleet.roll_back()).configuration == LOOKUP


# Replicas in this process.


async def test_a_replica_whose_devices_are_lost_holds_up_no_other(tiny_pair, expected, monkeypatch):
    """Nor does it keep the thread that the other needs."""
    fleet, there = here(tiny_pair, [FOUR, FOUR]), asyncio.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    monkeypatch.setattr(fleet.replicas[1].served.loop.engine.host, "wait", there.wait)

    async with fleet:
        fleet.replicas[1].served.loop._fail("its node is lost")
        waiting = fleet._restart(fleet.replicas[1])
        await asyncio.sleep(0.05)
        fleet.replicas[0].served.loop._fail("killed")
        [request] = requests(tiny_pair, "lost")[:1]
        assert await text(await fleet.submit([request])) == expected[0]
        lookup = fleet.deployment.model_copy(update={"configuration": LOOKUP})
        await fleet.deploy(lookup)
        assert not waiting.done()
        there.set()
        assert (await waiting).served.deployment == lookup


async def test_replicas_that_fail_at_once_are_started_side_by_side_and_a_deployment_waits_for_them(
    tiny_pair, monkeypatch
):
    fleet, loading, order = here(tiny_pair, [FOUR, FOUR]), asyncio.Barrier(2), []
    beside = ServedEngine.beside

    async def together(served, deployment):
        order.append(deployment.configuration)
        if deployment.configuration == FOUR:
            await loading.wait()
        return await beside(served, deployment)

    monkeypatch.setattr(ServedEngine, "beside", together)
    async with fleet, asyncio.timeout(60):
        for replica in fleet.replicas:
            replica.served.loop._fail("its node is lost")
        restarts = [fleet._restart(replica) for replica in fleet.replicas]
        while len(order) < 2:
            await asyncio.sleep(0.001)
        lookup = fleet.deployment.model_copy(update={"configuration": LOOKUP})
        assert await fleet.deploy(lookup) == fleet.deployment == lookup
        assert all(restart.done() for restart in restarts)
        assert (order, fleet.restarts) == ([FOUR, FOUR, LOOKUP, LOOKUP], 2)


async def test_another_replica_continues_with_the_same_text(tiny_pair, expected, monkeypatch):
    """Twice: the replica that continues fails, too."""
    monkeypatch.setattr(EngineProcess, "another", too_many_files)
    fleet = here(tiny_pair, [FOUR, LOOKUP, FOUR], slots=4)

    async with fleet:
        streams = [await fleet.submit([r]) for r in requests(tiny_pair, "moved")]
        running = asyncio.gather(*map(text, streams))
        assert {stream.served for stream in streams} == {r.served for r in fleet.replicas}
        await sent(streams[:4], 20)
        fleet.replicas[0].served.loop._fail("killed")
        while not fleet.resumed:
            await asyncio.sleep(0.001)
        await sent(streams, 40)
        fleet.replicas[1].served.loop._fail("killed")
        assert await running == expected
        assert fleet.running == 0
        assert fleet.failure is None
        by = {c.label for stream in streams for c, _ in stream.arms}
        assert by == {FOUR.label, LOOKUP.label}
        fleet.replicas[2].served.loop._fail("killed")
        with pytest.raises(EngineFailed, match="too many open files"):
            await fleet.submit(requests(tiny_pair, "late")[:1])


async def test_a_request_goes_to_the_replica_with_its_beginning_and_past_a_full_queue(tiny_pair):
    fleet = here(tiny_pair, [FOUR, FOUR], slots=2, queue=1)
    refusals: list[str] = []

    async with fleet:
        fleet.observer.refused = lambda: refusals.append("refused")
        turn = tuple(range(5, 45))
        first = await fleet.submit([Request("first", turn, 1)])
        await text(first)
        again = await fleet.submit([Request("again", (*turn, 7, 8), 200, ignore_eos=True)])
        assert again.served is first.served
        assert fleet.routed == {"prefix": 1, "busy": 0, "load": 1}
        streams = [again]
        for number in range(5):  # each replica has two slots, and one request may wait
            request = Request(str(number), (*turn, number), 200, ignore_eos=True)
            while any(each.waiting > max(each.running - 2, 0) for each in fleet.replicas):
                await asyncio.sleep(0.001)  # until the next step, a new request waits
            streams.append(await fleet.submit([request]))
        assert [replica.running for replica in fleet.replicas] == [3, 3]
        assert not fleet.accepting
        with pytest.raises(QueueFull):
            await fleet.submit([Request("many", turn, 4)])
        assert len(refusals) == 1
        for stream in streams:
            stream.close()
        assert (fleet.running, fleet.cancelled, fleet.accepting) == (0, 6, True)


async def test_a_deployment_that_one_replica_cannot_load_changes_none(tiny_pair, monkeypatch):
    fleet, loaded, load = here(tiny_pair, [FOUR, FOUR]), [], ServedEngine.beside

    async def beside(served, deployment):
        if served is fleet.replicas[1].served and deployment.configuration != LOOKUP:
            raise OSError("no memory")
        loaded.append(await load(served, deployment))
        return loaded[-1]

    monkeypatch.setattr(ServedEngine, "beside", beside)

    async with fleet:
        before = [replica.served for replica in fleet.replicas]
        wanted = fleet.deployment.model_copy(update={"configuration": AUTOREGRESSIVE})
        with pytest.raises(UserError, match="did not start: no memory"):
            await fleet.deploy(wanted)
        assert [replica.served for replica in fleet.replicas] == before
        [other] = loaded
        with pytest.raises(RuntimeError, match="after shutdown"):
            await other.loop.between_steps(lambda: None)
        await fleet.deploy(wanted.model_copy(update={"configuration": LOOKUP}))
        served = {replica.served.loop.engine.configuration for replica in fleet.replicas}
        assert served == {fleet.deployment.configuration} == {LOOKUP}


async def test_a_deployment_that_is_given_up_ends_the_engines_that_are_loaded(
    tiny_pair, monkeypatch
):
    fleet, loaded, load = here(tiny_pair, [FOUR, FOUR]), [], ServedEngine.beside

    async def beside(served, deployment):
        if served is fleet.replicas[1].served:
            await asyncio.Event().wait()
        loaded.append(await load(served, deployment))
        return loaded[-1]

    monkeypatch.setattr(ServedEngine, "beside", beside)

    async with fleet:
        before = [replica.served for replica in fleet.replicas]
        wanted = fleet.deployment.model_copy(update={"configuration": LOOKUP})
        deploying = asyncio.create_task(fleet.deploy(wanted))
        while not loaded:
            await asyncio.sleep(0.001)
        deploying.cancel()
        await asyncio.wait([deploying])
        assert deploying.cancelled()
        [other] = loaded
        assert not other.loop.engine.alive
        assert [replica.served for replica in fleet.replicas] == before


def trying(fleet, pair):
    """The challenger LOOKUP gets half of the traffic."""
    for replica in fleet.replicas:
        replica.challenger = served_of(Engine(pair, LOOKUP, 8))
        replica.challenger.loop.open()
    sides = zip(*((r.served, r.challenger) for r in fleet.replicas if r.challenger), strict=True)
    fleet.canary = Canary(*map(list, sides), 0.5)
    return fleet.canary


async def test_a_challenger_takes_turns_on_all_replicas_and_is_promoted_on_all(tiny_pair):
    async with here(tiny_pair, [FOUR, FOUR]) as fleet:
        champions = {replica.served for replica in fleet.replicas}
        await fleet.try_out(fleet.deployment.model_copy(update={"configuration": LOOKUP}), 0.5)
        challengers = {replica.challenger for replica in fleet.replicas}
        served = set()
        for number in range(40):
            stream = await fleet.submit(requests(tiny_pair, f"canary {number}", 4)[:1])
            served.add(stream.served)
            await text(stream)
        assert served == champions | challengers
        canary = fleet.canary
        assert (canary.status().state, canary.status().pairs) == ("running", 2)
        # A replica whose engine was started again meanwhile has no challenger.
        fleet.replicas[1].retire(fleet.replicas[1].challenger)
        canary.end("promoted", "the test says so")
        await text(await fleet.submit(requests(tiny_pair, "promoted", 4)[:1]))
        assert fleet.deployment.configuration == LOOKUP
        assert fleet.previous.configuration == FOUR
        while not all(map(fleet._current, fleet.replicas)):
            await fleet.watch(fleet.replicas[1])
            await asyncio.sleep(0.01)
        assert {r.served.loop.engine.configuration for r in fleet.replicas} == {LOOKUP}
        assert (fleet.switches, fleet.restarts) == (1, 0)


async def test_an_answer_that_another_engine_resumes_does_not_count_in_a_canary(
    tiny_pair, expected
):
    async with here(tiny_pair) as fleet:
        canary, [request] = trying(fleet, tiny_pair), requests(tiny_pair, "moved")[:1]
        stream = await fleet.submit([request])
        assert [stream.served] == canary.sides["challenger"]
        answering = asyncio.create_task(text(stream))
        await sent([stream], 20)
        stream.served.loop._fail("killed")
        assert await answering == expected[0]
        assert (fleet.resumed, canary._turn.counted, canary._clean) == (1, 0, {})


async def test_no_client_waits_for_a_load_where_a_canary_is_decided_meanwhile(tiny_pair):
    async with here(tiny_pair) as fleet:
        canary, champion = trying(fleet, tiny_pair), fleet.replicas[0].served
        first, second = requests(tiny_pair, "meanwhile", 4)[:2]
        async with fleet._changing, asyncio.timeout(20):
            canary.end("promoted", "the test says so")
            stream = await fleet.submit([first])
            assert stream.served is champion
            await text(stream)
        await text(await fleet.submit([second]))
        assert [fleet.replicas[0].served] == canary.sides["challenger"]


async def test_what_is_served_already_is_not_loaded_again(tiny_pair, tmp_path):
    """A rollback still returns to what was served before it."""
    operation = Operation(None, tmp_path / "deployed")
    again = Deployment(
        pair=tiny_pair.spec, configuration=FOUR, source="version 2", version=2, certificate="sure"
    )

    async with here(tiny_pair, [FOUR, FOUR], operation) as fleet:
        served = [replica.served for replica in fleet.replicas]
        before = fleet.previous = Deployment(pair=tiny_pair.spec, configuration=LOOKUP)
        canary = trying(fleet, tiny_pair)
        assert await fleet.deploy(again) == fleet.deployment == again
        assert canary.state == "dropped"
        assert [replica.served for replica in fleet.replicas] == served
        assert (fleet.previous, fleet.switches) == (before, 0)
        assert operation.last() == again


async def test_a_rollback_ends_the_first_canary(tiny_pair):
    async with here(tiny_pair, [FOUR, FOUR]) as fleet:
        canary, served = trying(fleet, tiny_pair), fleet.replicas[0].served
        assert (await fleet.roll_back()).configuration == FOUR
        assert (canary.state, fleet.replicas[0].served) == ("dropped", served)
        with pytest.raises(UserError, match="nothing else was served before"):
            await fleet.roll_back()


async def test_a_rollback_waits_for_what_is_being_deployed(tiny_pair):
    """It returns to what was served before that."""

    async with here(tiny_pair) as fleet:
        async with fleet._changing:
            rolling = asyncio.create_task(fleet.roll_back())
            await asyncio.sleep(0.01)
            fleet.previous = fleet.deployment
        assert await rolling == fleet.deployment


async def test_a_deployment_that_fails_leaves_the_canary_running(tiny_pair):
    wanted = Deployment(pair=tiny_pair.spec, configuration=AUTOREGRESSIVE)

    async with here(tiny_pair, [FOUR, FOUR]) as fleet:
        canary = trying(fleet, tiny_pair)
        for replica in fleet.replicas:
            replica.served.loop.engine.host.exclusive = True
        for order in (fleet.deploy, partial(fleet.try_out, share=0.5)):
            with pytest.raises(UserError, match="is not replaced while it serves"):
                await order(wanted)
        assert canary.state == "running"
        assert fleet._trying is canary


async def test_what_cannot_be_written_down_is_served_all_the_same(tiny_pair, tmp_path, caplog):
    (tmp_path / "file").touch()

    async with here(tiny_pair, [FOUR], Operation(None, tmp_path / "file" / "deployed")) as fleet:
        trying(fleet, tiny_pair).end("promoted", "the test says so")
        await text(await fleet.submit(requests(tiny_pair, "first", 4)[:1]))
        assert fleet.deployment.configuration == LOOKUP
        assert fleet.switches == 1
    assert "is not remembered" in caplog.text


async def known(served):
    """The rounds of each arm that a bandit knows of."""
    return list((await served.loop.between_steps(served.state))["rounds"])


async def test_replicas_share_what_they_learn(tiny_pair, monkeypatch):
    bandit = BANDIT
    monkeypatch.setattr(engine_fleet, "_SHARE", 0.01)
    fleet = here(tiny_pair, [bandit, bandit])

    async with fleet:
        first, second = (replica.served for replica in fleet.replicas)
        for number in range(1, 3):
            streams = [await fleet.submit([r]) for r in requests(tiny_pair, f"{number}", 20)[:2]]
            assert {stream.served for stream in streams} == {first, second}
            await asyncio.gather(*map(text, streams))
            while await known(first) != await known(second):
                await asyncio.sleep(0.01)
            each = max(counts.total() for stream in streams for _, counts in stream.arms)
            assert sum(await known(first)) > number * each


# Weights that are overwritten.


@pytest.fixture
def copied(tiny_spec, tmp_path):
    """The tiny pair with a draft that may be trained on."""
    folder = shutil.copytree(tiny_spec.drafts["draft"], tmp_path / "draft")
    return tiny_spec.model_copy(update={"drafts": {"draft": str(folder)}})


@pytest.fixture
def overwritten(copied):
    """A fleet of that pair, and what it serves."""
    first = deployed(copied, FOUR, certificate="sure")
    return service_of(Engine(load_pair(copied), FOUR), deployment=first).fleet, first


def train_on(spec):
    """The draft's folder has other weights from now on."""
    tiny_llama(7, 32, 2, vocab=len(tiny_tokenizer())).save_pretrained(spec.drafts["draft"])


def deployed(spec, configuration, **more):
    """As `specdec deploy` makes it."""
    weights = weights_here(spec, [configuration])
    return Deployment(pair=spec, configuration=configuration, weights=weights, **more)


async def test_weights_that_were_trained_anew_are_loaded_under_the_same_names(copied, overwritten):
    fleet, first = overwritten
    async with fleet:
        served = fleet.replicas[0].served
        await fleet.deploy(first)
        assert fleet.replicas[0].served is served
        train_on(copied)
        again = deployed(copied, FOUR)
        assert await fleet.deploy(again) == again
        trained = fleet.replicas[0].served
        assert trained is not served
        draft = trained.loop.engine.pair.fingerprints["draft"]
        assert draft == (again.weights or {})["draft"] != (first.weights or {})["draft"]
        assert fleet.deployment.certificate is None
        await fleet.deploy(again)
        assert fleet.replicas[0].served is trained
        with pytest.raises(UserError, match="nothing else was served before"):
            await fleet.roll_back()  # what was there is overwritten


async def test_a_rollback_to_weights_that_are_others_now_is_not_certified(copied, overwritten):
    fleet, first = overwritten
    async with fleet:
        await fleet.deploy(deployed(copied, LOOKUP))
        assert await fleet.roll_back() == first
        await fleet.roll_back()
        train_on(copied)
        back = await fleet.roll_back()
        assert back == deployed(copied, FOUR)
        assert back.certificate is None
        weights = {**(back.weights or {}), "target": "0"}
        with pytest.raises(UserError, match="has other weights than those that are served"):
            await fleet.deploy(back.model_copy(update={"weights": weights}))


async def test_an_engine_that_is_started_again_loads_the_weights_that_are_there(
    copied, overwritten
):
    fleet, _ = overwritten
    async with fleet:
        train_on(copied)
        fleet.replicas[0].served.loop._fail("killed")
        await text(await fleet.submit(requests(load_pair(copied), "again", 4)[:1]))
        assert fleet.deployment == deployed(copied, FOUR)
        assert fleet.restarts == 1
        await fleet.watch(fleet.replicas[0])
        assert fleet.replicas[0].restarting.done()
        assert (fleet.restarts, fleet.switches) == (1, 0)


def test_a_server_that_is_started_again_loads_the_weights_that_are_there(copied, tmp_path):
    operation, first = Operation(None, tmp_path / "kept"), deployed(copied, FOUR)
    start = Start(deployed(copied, LOOKUP, certificate="sure"), operation=operation)

    def found():
        [served] = start._loaded(lambda _, deployment: deployment)
        return served

    assert found() == start.deployment
    operation.keep(first.model_copy(update={"certificate": "sure"}))
    train_on(copied)
    assert found() == deployed(copied, FOUR) != first


@pytest.mark.parametrize("steps", [0, 3])
def test_a_prompts_log_probabilities_are_told_once(tiny_pair, steps):
    """Also where the first engine fails before its first token."""
    asked = {"logprobs": 1, "prompt_logprobs": True, "ignore_eos": True}
    request = Request("r", tuple(range(5, 40)), 24, **asked)
    [whole] = Engine(tiny_pair).generate([request])
    failing, other = Engine(tiny_pair), Engine(tiny_pair)
    answer = _StreamedAnswer(request, 0)
    failing.add(request)
    told = [answer.took(chunk) for _ in range(steps) for chunk in failing.step()]
    told += [answer.took(chunk) for chunk in other.stream(answer.rest())]
    assert told[0].prompt_logprobs == whole.prompt_logprobs
    assert not any(chunk.prompt_logprobs for chunk in told[1:])
    finished = told[-1].finished
    assert finished.prompt_logprobs == whole.prompt_logprobs
    assert finished.tokens == whole.tokens
    assert [entry.token for entry in finished.logprobs] == whole.tokens
