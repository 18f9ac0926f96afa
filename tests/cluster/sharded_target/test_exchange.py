"""Ranks exchange tensors of any size and messages that are data, whatever else connects."""

import pickle
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from cluster.sharded_target.exchange import SocketExchange, all_agree
from cluster.sharded_target.messages import LARGEST, ShardFailed, decode, encode
from cluster.sharded_target.shard import Shard
from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.base.wire import LinkLost, WireListener
from specdec_core.models.runner import Batch

RANKS = 3
SILENT: list[socket.socket] = []
LARGE = 1 << 21  # 8 MB: more than sockets hold


def connected(rank, ranks, folder):
    """All ranks know all addresses, as Ray tells them."""
    listener = WireListener("127.0.0.1", LARGEST, patience=None)
    write_atomically(folder / str(rank), f"{listener.port} {listener.key.hex()}")
    addresses = []
    for other in range(ranks):
        while not (folder / str(other)).exists():
            time.sleep(0.01)
        port, key = (folder / str(other)).read_text().split()
        addresses.append(("127.0.0.1", int(port), bytes.fromhex(key)))
    for _, port, _ in addresses:  # strangers come first: a port scan, and one that is silent
        with socket.create_connection(("127.0.0.1", port)) as scan:
            scan.sendall(b"GET / HTTP/1.1\r\n" * 10)
        SILENT.append(socket.create_connection(("127.0.0.1", port)))
    (folder / f"{rank} visited").touch()
    while not all((folder / f"{other} visited").exists() for other in range(ranks)):
        time.sleep(0.01)  # a rank that has its peers closes its port
    return SocketExchange(listener, rank, addresses)


def rank_of_three(rank, folder):
    exchange = connected(rank, RANKS, Path(folder))
    for size in (1, LARGE):
        assert (exchange.sum(torch.full((size, 1), rank + 1.0)) == 6).all()
    cpu = torch.device("cpu")
    assert all_agree(exchange, cpu, True)
    assert not all_agree(exchange, cpu, rank != 1)
    pieces = exchange.gather(torch.tensor([[rank]], dtype=torch.bfloat16))
    assert [int(piece) for piece in pieces] == ([0, 1, 2] if rank == 0 else [])
    # A chain, twice, of which the first two are done before the last has begun.
    for turn in range(2):
        hidden = torch.full((2, LARGE // 2), float(turn))
        if rank > 0:
            hidden = exchange.receive(hidden, rank - 1)
        if rank < RANKS - 1:
            exchange.send(hidden + 1, rank + 1)
        assert (hidden == turn + rank).all()
    exchange.sum(torch.zeros(1))  # all have read what was sent


def test_all_have_the_sum_and_the_vote_the_first_the_pieces_the_next_what_was_sent(tmp_path):
    mp.start_processes(rank_of_three, (str(tmp_path),), RANKS, start_method="fork")


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
