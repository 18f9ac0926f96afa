"""A target of which each rank's part is compiled writes the eager tokens."""

import re

import psutil
import pytest

from cluster.placement import Placement
from cluster.sharded_target import shard as shards
from cluster.sharded_target.messages import decode, encode
from cluster.sharded_target.shard import Shard
from cluster.sharded_target.sharded_pair import sharded_pair
from cluster.sharded_target.sharded_runner import ShardedRunner
from specdec_core.base.errors import UserError
from specdec_core.config import Configuration
from specdec_core.engine import Engine
from specdec_core.models import compiled
from specdec_core.models.compiled.failures import CannotCompile
from specdec_core.models.pair import load_pair
from specdec_core.models.runner import PREFILL_CHUNK
from tests.cluster.clusters import process_of
from tests.cluster.sharded_target.test_sharded_runner import REQUESTS
from tests.configurations import LOOKUP, SUFFIX


@pytest.mark.long
@pytest.mark.parametrize("split", ["heads", "layers"])
def test_it_decodes_as_the_eager_whole_model(split, tiny_spec, gpt2_folder, ray_running):
    target = tiny_spec.target if split == "heads" else gpt2_folder
    eager = tiny_spec.model_copy(update={"target": target, "drafts": {}})
    spec, whole = eager.with_runner(compile=True), load_pair(eager)
    placement = {"draft": {"devices": 0}, "target": {"devices": 2, "split": split}}
    with sharded_pair(spec, Placement.model_validate(placement)) as sharded:
        large = ShardedRunner(sharded.group, 1, 128_000)
        assert large.prefill_chunk == PREFILL_CHUNK, "a prompt's logits are not computed"
        for configuration in (Configuration(), LOOKUP, SUFFIX):
            found, expected = (
                [g.tokens for g in Engine(pair, configuration, slots=2).generate(REQUESTS)]
                for pair in (sharded, whole)
            )
            assert found == expected
        for shard in sharded.group._shards:
            files = {mapped.path for mapped in psutil.Process(process_of(shard)).memory_maps()}
            assert any("/graphs/" in file for file in files), "each rank runs a graph of its own"


def test_a_part_that_no_graph_holds_is_one_line_that_says_how_to_go_on(tiny_spec, monkeypatch):
    def no_graph(*_):
        raise CannotCompile("no memory left")

    monkeypatch.setattr(shards, "EagerRunner", lambda *_, **__: None)
    monkeypatch.setattr(compiled, "CompiledRunner", no_graph)
    shard = object.__new__(Shard)
    shard.spec, shard.runners, shard.apart = tiny_spec.with_runner(compile=True), {}, set()
    shard.model = shard.exchange = shard.device = None
    shard._open, shard._digest = shard._open_part, "weights"
    answer = decode(encode(shard._do([(0, "open", (1, None))])))
    assert isinstance(answer.error, UserError)
    said = rf"{tiny_spec.target}: .*no memory left.*: use --no-compile \(runner.compile: false\)"
    assert re.fullmatch(said, str(answer.error))
