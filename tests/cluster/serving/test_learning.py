"""A served bandit goes on learning, says what it knows of its arms, and is found again."""

import asyncio
import json

import pytest

from cluster.serving import fleet
from cluster.serving.deployment import learned_state
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.drafting.bandit.drafter import build_bandit
from specdec_core.drafting.bandit.settings import BanditSettings
from specdec_core.drafting.states import save_state
from specdec_core.engine import Engine, Request
from tests.cluster.serving.http.events import client_of
from tests.configurations import CHAIN
from tests.local_server import service_of

BANDIT = Configuration(drafter=BanditSettings(rule="exp3", arms=[1, 4, {"kind": "prompt_lookup"}]))
BODY = {"prompt": "def main(", "max_tokens": 40, "ignore_eos": True}


def state_of(service):
    return service.fleet.replicas[0].served.state()


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

    again = service_of(Engine(tiny_pair, BANDIT, 2), learned=path)
    assert state_of(again) == state
    (more,) = await session(again, 1)
    assert sum(arm["rounds"] for arm in more["arms"]) > rounds[1]


async def test_it_is_kept_now_and_then_also_after_a_failure(tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setattr(fleet, "KEEP", 0.01)
    path = tmp_path / "state.json"
    service = service_of(Engine(tiny_pair, BANDIT), learned=path)
    keep, failures = service.fleet.keep_learned, [RuntimeError("the engine's process has ended")]

    async def fails_once():
        if failures:
            raise failures.pop()
        await keep()

    monkeypatch.setattr(service.fleet, "keep_learned", fails_once)

    async with service.running():
        stream = await service.submit([Request("r", (5, 6, 7), 8, ignore_eos=True)])
        async for _ in stream:
            pass
        while not path.exists() or json.loads(path.read_text()) != state_of(service):
            await asyncio.sleep(0.01)


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


def test_each_configuration_is_kept_by_itself_in_the_workspace(tiny_spec, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    path = learned_state(tiny_spec, BANDIT)
    assert path.parent == tmp_path / "bandits"
    other = BANDIT.model_copy(update={"drafter": BanditSettings(arms=[1, 2])})
    assert learned_state(tiny_spec, other) != path
    save_state(build_bandit(other.drafter).state(), path)
    with pytest.raises(UserError, match="learned by ucb") as caught:
        learned_state(tiny_spec, BANDIT)
    assert str(path) in str(caught.value)
    missing = BanditSettings(arms=[1, 2], state=str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="no saved state can be read"):
        learned_state(tiny_spec, Configuration(drafter=missing))
