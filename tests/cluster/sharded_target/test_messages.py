"""What goes to shards and comes back is data: numbers, text and tensors, and nothing else."""

import pickle
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
import torch

from cluster.sharded_target.messages import ShardFailed, decode, encode
from cluster.sharded_target.shard import Shard
from specdec_core.base.errors import UserError
from specdec_core.base.wire import LinkLost
from specdec_core.models.runner import Batch


def test_calls_and_answers_come_back_as_they_were():
    batch = Batch([0, 2], [[5, 6], [7]], [None, [-1]], [1, 1])
    assert decode(encode([(1, "forward", (batch, True))])) == [[1, "forward", [batch, True]]]
    rows = Batch(range(2), [np.arange(2)])
    assert decode(encode(rows)) == Batch([0, 1], [[0, 1]])
    for dtype, size in ((torch.float32, 6), (torch.bfloat16, 6), (torch.float32, 0)):
        tensor = torch.arange(size, dtype=dtype).view(-1, 3)
        chosen, logits, hidden = decode(encode(([1, 2], tensor, None)))
        assert (chosen, hidden, logits.dtype) == ([1, 2], None, dtype)
        assert torch.equal(logits, tensor)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ValueError("do not fit"), ValueError),
        (UserError("no such model"), UserError),
        (LinkLost("gone"), LinkLost),
        (torch.OutOfMemoryError("out of memory"), RuntimeError),
        (KeyError("layer"), RuntimeError),
    ],
)
def test_an_error_keeps_its_words_and_its_traceback(raised, kind):
    failed = decode(encode(ShardFailed.by(raised)))
    assert type(failed.error) is kind
    assert str(raised) in str(failed.error)
    assert type(raised).__name__ in failed.error.__notes__[0]


def test_a_pickle_is_not_run_and_no_other_method_called():
    with pytest.raises(msgpack.ExtraData):
        decode(pickle.dumps(print))
    with pytest.raises(TypeError, match="not for a message"):
        encode(print)
    shard = object.__new__(Shard)
    shard.apart = set()
    answer = shard._do([(0, "_join", ((), None))])
    assert str(answer.error) == "_join: no call of a shard"


def test_operations_of_a_runner_reach_it():
    shard, made = object.__new__(Shard), []
    shard.apart = set()
    names = ("truncate", "keep", "fork")
    calls = {name: lambda *arguments, name=name: made.append((name, arguments)) for name in names}
    shard.runners = {3: SimpleNamespace(**calls)}
    assert shard._do([(3, name, (0, 1)) for name in names]) is None
    assert made == [(name, (0, 1)) for name in names]
