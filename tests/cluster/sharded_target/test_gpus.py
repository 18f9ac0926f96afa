"""A target over the GPUs of this machine: a rank on each, which exchange over NCCL."""

import pytest
import ray
import torch

from cluster.placement import Placement, place
from cluster.session import start_actor
from cluster.sharded_target.shard import Shard
from cluster.sharded_target.sharded_pair import sharded_pair
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import load_pair
from tests.configurations import CHAIN

REQUESTS = [Request(str(n), tuple(range(7, 12 + n)), 24, seed=n) for n in range(3)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("split", ["heads", "layers"])
def test_a_target_over_gpus_decodes_as_on_one(split, compiled, tiny_spec, ray_running):
    spec = tiny_spec.with_runner(compile=compiled)
    target = {"devices": min(torch.cuda.device_count(), 2), "split": split}
    devices = {"device": "gpu", "draft": {"devices": 0}, "target": target}
    with sharded_pair(spec, Placement.model_validate(devices)) as sharded:
        tokens = [
            [generation.tokens for generation in Engine(pair, CHAIN, slots=2).generate(REQUESTS)]
            for pair in (load_pair(spec), sharded)
        ]
    assert tokens[0] == tokens[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_shard_has_a_gpu_of_its_own(tiny_spec, ray_running):
    parts = min(torch.cuda.device_count(), 2)
    devices = {"device": "gpu", "draft": {"devices": 0}, "target": {"devices": parts}}
    placed = place(Placement.model_validate(devices))
    try:
        # Shards of a group serve it and answer nobody else.
        shards = [
            start_actor(Shard, tiny_spec, "heads", rank, parts, **placed.options("target", rank))
            for rank in range(parts)
        ]
        seen = [
            shard.__ray_call__.remote(lambda rank: (str(rank.device), torch.cuda.device_count()))
            for shard in shards
        ]
        assert {*ray.get(seen)} == {("cuda:0", 1)}
        for shard in shards:
            ray.kill(shard)
    finally:
        placed.remove()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_prefill_ends_when_the_gpu_has_computed_it():
    shard = object.__new__(Shard)
    shard.device, shard.runners = torch.device("cuda", 0), {}
    stream = torch.cuda.current_stream()
    torch.cuda._sleep(500_000_000)  # cycles
    assert not stream.query()
    shard.prefill(0, [])
    assert stream.query()
