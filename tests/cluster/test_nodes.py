"""A target split over nodes, with a draft on a third one, decodes as one in this process does."""

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from ray.cluster_utils import Cluster

from cluster.placed_engine import placed_engine
from cluster.placement import Placement
from cluster.session import QUIET, ray_session
from specdec_core.config import Sampling
from specdec_core.engine import Engine, Request
from specdec_core.engine.scheduler import Limits
from specdec_core.models.pair import load_pair
from specdec_core.tokens.statistics import TokenOrigin
from tests.configurations import PEARL


@pytest.fixture
def three_nodes(monkeypatch):
    """The address of a cluster with three nodes of one core each."""
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    options = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


def decode(address, spec):
    """A process of its own, as other tests' Ray may run in theirs."""
    os.environ["RAY_ADDRESS"] = address
    whole = load_pair(spec)
    request = Request("a", tuple(whole.tokenizer("def main():")["input_ids"]), 200)
    [expected] = Engine(whole).generate([request])
    placement = Placement.model_validate({"target": {"devices": 2, "split": "heads"}})
    with ray_session(), placed_engine(spec, PEARL, Limits(1), placement) as engine:
        group = engine.pair.group
        assert len({fact.node for fact in group.facts}) == 2
        origins: list[TokenOrigin] = []
        while TokenOrigin.DRAFT not in origins:  # a draft that has come needs a moment
            [generation] = engine.generate([request])
            assert generation.tokens == expected.tokens
            origins = generation.origins

        engine.add(request)
        for _ in range(5):
            engine.step()
        os.kill(group.facts[1].pid, signal.SIGKILL)
        while not engine.idle:
            [chunk] = engine.step()
        assert chunk.finished.tokens == expected.tokens
        assert group.rebuilt == 1

        sampled = Request("b", request.tokens, 100, Sampling(temperature=1.0), ignore_eos=True)
        [generation] = engine.generate([sampled])
        assert len(generation.tokens) == 100


@pytest.mark.long
def test_a_target_on_two_nodes_with_its_draft_on_a_third_loses_nothing_with_a_shard(
    three_nodes, tiny_spec
):
    with ProcessPoolExecutor(1, get_context("spawn")) as driver:
        driver.submit(decode, three_nodes, tiny_spec).result()
