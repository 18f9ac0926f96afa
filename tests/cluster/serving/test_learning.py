"""What a server learns from its traffic: of arms, of a challenger, and that prompts changed."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush
from math import log2
from pathlib import Path
from random import Random

import pytest

from cluster.serving import engine_fleet, served
from cluster.serving.canary import COUNTED, PAIRS, Canary, check_comparable
from cluster.serving.deployment import deployment_of, learned_state
from cluster.serving.drift import WEEK, Drift
from cluster.serving.served import Deployment
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.drafting.bandit.drafter import build_bandit
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.states import save_state
from specdec_core.engine import Engine, Request
from tests.cluster.serving.http.events import client_of
from tests.configurations import CHAIN, LOSSY
from tests.local_server import fleet_of, opened, served_of, service_of

BANDIT = Configuration(drafter=BanditSettings(rule="exp3", arms=[1, 4, {"kind": "prompt_lookup"}]))
BODY = {"prompt": "def main(", "max_tokens": 40, "ignore_eos": True}


async def session(service, completions):
    """Run the application as a server would; /health after each completion."""
    found = []
    async with client_of(service) as http:
        for _ in range(completions):
            answer = await http.post("/v1/completions", json=BODY)
            assert answer.status_code == 200, answer.text
            found.append((await http.get("/health")).json())
    return found


async def test_the_arms_are_shown_and_what_was_learned_is_kept(tiny_pair, tmp_path):
    path = tmp_path / "bandits" / "state.json"
    service = service_of(Engine(tiny_pair, BANDIT, 2), learned=path)
    before, after = await session(service, 2)
    names = [arm.label for arm in BANDIT.drafter.arms]
    assert [arm["arm"] for arm in before["arms"]] == names
    rounds = [sum(arm["rounds"] for arm in health["arms"]) for health in (before, after)]
    assert 0 < rounds[0] < rounds[1]
    state = json.loads(path.read_text())
    assert state["rounds"] == [arm["rounds"] for arm in after["arms"]]

    engine = Engine(tiny_pair, BANDIT, 2)
    again = service_of(engine, learned=path)
    assert engine.learned.state() == state
    (more,) = await session(again, 1)
    assert sum(arm["rounds"] for arm in more["arms"]) > rounds[1]


async def test_it_is_kept_now_and_then_also_after_a_failure(tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_fleet, "KEEP", 0.01)
    path = tmp_path / "state.json"
    engine = Engine(tiny_pair, BANDIT)
    service = service_of(engine, learned=path)
    keep, failures = service.fleet.keep_learned, [RuntimeError("the engine's process has ended")]
    threads: list[str] = []

    async def fails_once():
        if failures:
            raise failures.pop()
        await keep()

    def saved(*state):
        threads.append(threading.current_thread().name)
        return save_state(*state)

    monkeypatch.setattr(service.fleet, "keep_learned", fails_once)
    monkeypatch.setattr(served, "save_state", saved)

    async with service.running():
        stream = await service.submit([Request("r", (5, 6, 7), 8, ignore_eos=True)])
        async for _ in stream:
            pass
        while not path.exists() or json.loads(path.read_text()) != engine.learned.state():
            await asyncio.sleep(0.01)
    # The engine's thread, which delivers its steps, does not wait for the disk.
    assert not [name for name in threads if name.startswith("engine")]


async def test_what_a_full_disk_does_not_take_is_saved_once_there_is_room(
    tiny_pair, small_disk, caplog
):
    path = small_disk.folder / "state.json"
    many = Configuration(drafter=BanditSettings(rule="exp3", arms=[*range(1, 17)]))
    service = service_of(Engine(tiny_pair, many), learned=path)

    async with service.fleet:
        async for _ in await service.submit([Request("r", (5, 6, 7), 40, ignore_eos=True)]):
            pass
        small_disk.fill()
        await service.fleet.keep_learned()
        assert f"not saved: {path}: cannot be written, {small_disk.reason}" in caplog.text
        assert not path.exists()
        small_disk.make_room()
        await service.fleet.keep_learned()
        assert sum(json.loads(path.read_text())["rounds"]) > 0


@pytest.mark.parametrize(
    "configuration",
    [
        CHAIN,
        BANDIT.model_copy(
            update={"drafter": BANDIT.drafter.model_copy(update={"memory": "request"})}
        ),
    ],
)
async def test_nothing_is_kept_where_nothing_is_learned_across_requests(
    tiny_pair, tiny_spec, tmp_path, configuration
):
    path = tmp_path / "state.json"
    service = service_of(Engine(tiny_pair, configuration), learned=path)
    (health,) = await session(service, 1)
    assert "arms" not in health
    assert not path.exists()
    assert learned_state(tiny_spec, configuration) is None


def test_each_configuration_is_kept_by_itself_in_the_workspace(tiny_spec, bare_home):
    path = learned_state(tiny_spec, BANDIT)
    assert path.parent == bare_home / "bandits"
    other = BANDIT.model_copy(update={"drafter": BanditSettings(arms=[1, 2])})
    assert learned_state(tiny_spec, other) != path
    sent = Deployment(pair=tiny_spec, configuration=BANDIT, learned=Path("/home/other/x.json"))
    assert sent.received().learned == path  # of a client on another machine
    save_state(build_bandit(other.drafter).state(), path)
    with pytest.raises(UserError, match="learned by ucb") as caught:
        learned_state(tiny_spec, BANDIT)
    assert str(path) in str(caught.value)
    missing = BanditSettings(arms=[1, 2], state=str(bare_home / "none.json"))
    with pytest.raises(UserError, match="no saved state can be read"):
        learned_state(tiny_spec, Configuration(drafter=missing))


@pytest.mark.usefixtures("bare_home")
async def test_what_is_deployed_to_a_fresh_server_neither_uses_nor_keeps_what_is_learned(tiny_pair):
    first = deployment_of(tiny_pair.spec, CHAIN, fresh=True)
    wanted = deployment_of(tiny_pair.spec, BANDIT)
    async with fleet_of(Engine(tiny_pair, CHAIN), deployment=first) as fleet:
        found = await fleet.deploy(wanted)
        assert found == wanted.model_copy(update={"fresh": True, "learned": None})
        async for _ in await fleet.submit([Request("r", (5, 6, 7), 8, ignore_eos=True)]):
            pass
    assert wanted.learned is not None
    assert not wanted.learned.exists()


@pytest.fixture(scope="module")
def sides(tiny_pair):
    return [served_of(Engine(tiny_pair, each)) for each in (AUTOREGRESSIVE, CHAIN)]


@pytest.fixture(scope="module")
def generation(tiny_pair):
    [one] = Engine(tiny_pair).generate([Request("r", (5, 6, 7), 8, ignore_eos=True)])
    return one


def tried(sides, generation, speedup, most):
    """A canary of up to `most` requests, one after the other, that the challenger answers so many
    times faster; and which of them it answered."""
    canary, taken, random = Canary([sides[0]], [sides[1]], 0.2), [], Random(0)
    for number in range(most):
        took = canary.choose([str(number)]) == "challenger"
        seconds = random.uniform(1, 3) / (speedup if took else 1)
        canary.ended(str(number), replace(generation, seconds=seconds))
        taken.append(took)
        if canary.state != "running":
            break
    return canary, taken


def test_it_gets_its_share(sides, generation):
    canary, taken = tried(sides, generation, 1.0, 20 * COUNTED)
    assert sum(taken) / len(taken) == pytest.approx(0.2, abs=0.05)
    assert (canary.state, canary.status().pairs) == ("running", 3)


@pytest.mark.parametrize(("speedup", "state"), [(2.0, "promoted"), (0.5, "dropped")])
def test_a_clear_difference_decides(sides, generation, speedup, state):
    canary, _ = tried(sides, generation, speedup, PAIRS * 5 * COUNTED)
    assert canary.state == state
    assert canary.status().pairs < PAIRS / 2
    assert canary.status().ratio == pytest.approx(speedup, rel=0.3)


def test_what_is_not_faster_is_dropped_in_the_end(sides, generation):
    canary, _ = tried(sides, generation, 1.0, (PAIRS + 2) * 5 * COUNTED)
    assert canary.state == "dropped"
    assert "not shown to be faster" in canary.reason


async def test_requests_beside_a_busy_engine_do_not_count(sides, generation):
    """The champion is still busy with what it took before the challenger's turn."""
    canary = Canary([sides[0]], [sides[1]], 0.5)

    with opened(sides[0].loop) as loop:
        submission = loop.submit([Request("long", (5, 6), 200, ignore_eos=True)])
        for number in range(COUNTED):
            assert canary.choose([str(number)]) == "challenger"
            canary.ended(str(number), generation)
        assert canary.choose(["next"]) == "challenger"  # its turn is not over
        submission.close()


def test_a_lossy_configuration_is_no_canary():
    with pytest.raises(UserError, match="texts would differ"):
        check_comparable([CHAIN, LOSSY], 0.1)
    with pytest.raises(UserError, match="less than 1"):
        check_comparable([CHAIN], 1.0)
    check_comparable([CHAIN, AUTOREGRESSIVE], 0.1)


Traffic = Iterator[tuple[float, float, float]]  # seconds, log₂ of prompt tokens, acceptance


def alone(random, rate):
    """`rate` requests a second. Seven in ten are questions, the rest bring documents along."""
    now = 0.0
    while True:
        now += random.expovariate(rate)
        centre, spread = (4.5, 0.6) if random.random() < 0.7 else (8, 0.4)
        yield now, log2(random.lognormvariate(centre, spread) + 1), random.betavariate(5, 3)


def conversations(random, rate):
    """The same rate, by users who ask one to eight times, a minute apart, with prompts that grow
    and texts that are easy or hard to draft."""
    began, number = random.expovariate(rate / 4.5), 0
    waiting: list[tuple[float, int, float, float, int]] = []
    while True:
        while not waiting or began < waiting[0][0]:
            level = random.betavariate(5, 3)
            first = random.lognormvariate(5, 1)
            heappush(waiting, (began, number, first, level, random.randint(1, 8)))
            began, number = began + random.expovariate(rate / 4.5), number + 1
        now, user, tokens, level, left = heappop(waiting)
        yield now, log2(tokens + 1), min(max(random.gauss(level, 0.1), 0), 1)
        if left > 1:
            longer = tokens + random.lognormvariate(5, 0.5)
            heappush(waiting, (now + random.expovariate(1 / 60), user, longer, level, left - 1))


def watched(traffic, seconds):
    """What the first `seconds` of this traffic left behind."""
    clock = [0.0]
    drift = Drift(lambda: clock[0])
    for now, length, acceptance in traffic:
        if now > seconds:
            break
        clock[0] = now
        drift._add("acceptance", acceptance)
        drift._add("prompt_tokens", length)
    return drift


def changed(at, prompt, acceptance, seed):
    """A request each three seconds; from then on prompts and acceptance are so much greater."""
    random, now = Random(seed), 0.0
    while True:
        now += random.expovariate(0.3)
        more = now > at
        yield now, random.gauss(8, 1.5) + more * prompt, random.gauss(0.6, 0.15) + more * acceptance


def test_a_day_of_conversations_raises_no_alarm_and_each_change_that_matters_one():
    assert not watched(conversations(Random(1), 0.1), WEEK / 7).alarms
    [longer] = watched(changed(WEEK / 14, 1.0, 0.0, seed=2), WEEK / 9).alarms
    assert longer.signal == "prompt_tokens"
    assert longer.before == pytest.approx(256, rel=0.05)
    assert longer.after == pytest.approx(512, rel=0.2)
    [harder] = watched(changed(WEEK / 14, 0.0, -0.1, seed=3), WEEK / 9).alarms
    assert harder.signal == "acceptance"
    assert harder.before == pytest.approx(0.6, abs=0.01)
    assert harder.after == pytest.approx(0.5, abs=0.04)


def test_a_difference_that_changes_no_choice_raises_no_alarm():
    """It is far more than chance explains, and no finalist would change places for it."""
    assert not watched(changed(WEEK / 14, log2(1.1), -0.02, seed=4), WEEK / 4).alarms


@pytest.mark.long
@pytest.mark.parametrize("rate", [0.003, 0.02, 0.1])
@pytest.mark.parametrize("traffic", [alone, conversations])
def test_steady_traffic_raises_at_most_one_false_alarm_in_a_week(traffic, rate):
    weeks = 10 if rate == 0.1 else 40
    raised = watched(traffic(Random(5), rate), weeks * WEEK).counts
    print(f"{traffic.__name__}, {rate} requests/s, {weeks} weeks: {raised}")
    assert sum(raised.values()) <= weeks
