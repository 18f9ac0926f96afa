"""A challenger gets its share of the traffic, and only a real difference in speed decides."""

from dataclasses import replace
from random import Random

import pytest

from cluster.serving.canary import COUNTED, PAIRS, Canary, check_comparable
from cluster.serving.engine_loop import EngineLoop
from cluster.serving.served import Deployment, Served
from specdec_core.base.errors import UserError
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.engine import Engine, Request
from tests.configurations import CHAIN, LOSSY


@pytest.fixture(scope="module")
def sides(tiny_pair):
    champion, challenger = (
        Served(
            EngineLoop(Engine(tiny_pair, configuration)),
            Deployment(pair=tiny_pair.spec, configuration=configuration),
        )
        for configuration in (AUTOREGRESSIVE, CHAIN)
    )
    return champion, challenger


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

    async with sides[0].loop as loop:
        submission = await loop.submit([Request("long", (5, 6), 200, ignore_eos=True)])
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
