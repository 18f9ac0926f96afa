"""What is timed has its node to itself."""

import pytest
import ray

from cluster.placement import Placement, place
from cluster.sweep import alone as module
from cluster.sweep.alone import alone, left_cores
from cluster.sweep.measuring import open_measuring
from specdec_core.config import Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.pre_cut import PreCutSettings
from tests.commands import wait_until
from tests.observers import Heard

pytestmark = pytest.mark.usefixtures("ray_running")


@ray.remote(num_cpus=1)
class Other:
    def ready(self):
        pass


@pytest.fixture(scope="module")
def measuring(tiny_spec):
    with open_measuring(tiny_spec, None, gpus=0) as (measuring, placed):
        assert placed is None
        yield measuring


def starts(seconds):
    """Whether Ray gives a core to somebody else within `seconds`."""
    other = Other.remote()
    ready, _ = ray.wait([other.ready.remote()], timeout=seconds)
    ray.kill(other)
    return bool(ready)


def test_nobody_gets_a_core_of_the_node_meanwhile(measuring):
    heard = Heard()
    with alone(measuring, 0, heard):
        assert not starts(1)
    assert starts(60)
    assert (heard.stages, heard.warnings) == ([], [])


def test_every_core_of_a_placements_nodes_is_reserved_that_it_does_not_hold():
    nodes = [{"NodeID": name, "Resources": {"CPU": 4.0}} for name in "abcd"]
    assert left_cores(nodes, {"a": 0, "b": 1, "c": 4}) == {"a": 4, "b": 3}


def test_what_the_caller_holds_of_the_node_is_not_waited_for(measuring):
    placed = place(Placement.model_validate({"draft": {"devices": 0}}))
    heard = Heard()
    try:
        with alone(measuring, 0, heard, placed):
            assert not starts(1)
    finally:
        placed.remove()
    assert (heard.stages, heard.warnings) == ([], [])


def test_others_on_the_node_are_waited_for_and_named_when_they_stay(measuring, monkeypatch):
    monkeypatch.setattr(module, "ALONE_SECONDS", 0.5)
    monkeypatch.setattr(module, "AT_ONCE", 0.5)
    other = Other.remote()
    ray.get(other.ready.remote())
    heard = Heard()
    with alone(measuring, 0, heard):
        pass
    ray.kill(other)
    assert heard.stages[0].startswith("waiting for other work to leave")
    assert "beside other work" in heard.warnings[0]


def test_a_policy_that_asks_what_the_target_costs_is_profiled_at_that_cost(measuring):
    asking = Configuration(drafter=DraftModelSettings(policy=PreCutSettings()))
    assert asking.unpriced
    profile = measuring.profile([asking], widths=(1, 2), contexts=(8,), batches=(1,), repeats=1)
    assert profile.policies.keys() == {"draft pre_cut"}


def test_a_measuring_process_that_is_gone_is_known_to_be_lost(measuring):
    assert not measuring.lost
    measuring.kill()
    wait_until(lambda: measuring.lost, 30)
