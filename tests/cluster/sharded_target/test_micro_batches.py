"""Rows of a target that is split by layers are fed as micro-batches, which its stages overlap."""

from pathlib import Path

import torch
import torch.multiprocessing as mp
import transformers

from cluster.sharded_target.micro_batches import micro_batches
from cluster.sharded_target.shard import Shard
from cluster.sharded_target.shard_weights import load_layers
from specdec_core.models.eager import EagerRunner
from specdec_core.models.runner import Batch
from tests.cluster.sharded_target.test_exchange import connected
from tests.cluster.sharded_target.test_shard_weights import FAMILIES
from tests.commands import wait_until

PROMPTS = [list(range(5, 25)), list(range(40, 50)), [7], list(range(60, 64))]
BATCH = Batch(range(4), [[5, 6, 7], [8], [9, 10], [11]])


def test_rows_stay_in_order_and_keep_their_trees_and_wanted_logits():
    trees, wanted = [None, [-1, 0, 0], None], [1, 3, 0]
    batch = Batch([4, 2, 0], [[1], [2, 3, 4], [5, 6]], trees, wanted)
    assert micro_batches(batch, 1) == [batch]
    assert micro_batches(batch, 2) == [
        Batch([4, 2], [[1], [2, 3, 4]], trees[:2], wanted[:2]),
        Batch([0], [[5, 6]], [None], [0]),
    ]
    assert [part.rows for part in micro_batches(batch, 9)] == [[4], [2], [0]]


def test_they_have_about_as_many_tokens_each():
    assert [part.rows for part in micro_batches(BATCH, 2)] == [range(1), range(1, 4)]
    alone = Batch([3], [[1] * 40])
    assert micro_batches(alone, 4) == [alone]


def stage(rank, folder):
    """One of two processes."""
    exchange = connected(rank, 2, Path(folder) / "ranks")
    model = load_layers(folder, torch.float32, exchange)
    shard = object.__new__(Shard)
    shard.device = torch.device("cpu")
    shard.runners, shard.outputs, shard.answers = {0: EagerRunner(model, 4, 64)}, {}, rank == 1
    shard.prefill(0, [Batch(range(4), PROMPTS, wanted=[0] * 4)])
    first_stage_is_done = Path(folder) / "done"
    if rank == 1:
        wait_until(first_stage_is_done.exists)
        exchange._arrived[0] += exchange._wires[0].receive()
        assert len(exchange._arrived[0]) == 2, "in flight before the last stage begins"
    answer = shard.forward(0, micro_batches(BATCH, 2), True)
    if rank == 0:
        first_stage_is_done.touch()
        wait_until((Path(folder) / "answered").exists)  # its end would close the connection
    else:
        torch.save(answer, f"{folder}/answer")
        (Path(folder) / "answered").touch()


def test_a_stage_begins_the_next_one_before_the_last_stage_has_answered(tmp_path):
    torch.manual_seed(0)
    whole = transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"]).float().eval()
    whole.save_pretrained(tmp_path)
    mp.start_processes(stage, (str(tmp_path),), 2, start_method="fork")
    chosen, logits, hidden = torch.load(tmp_path / "answer")
    runner = EagerRunner(whole, 4, 64)
    runner.prefill(range(4), PROMPTS)
    expected = runner.forward(BATCH)
    assert chosen == expected.chosen.tolist()
    torch.testing.assert_close(logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert hidden is None
