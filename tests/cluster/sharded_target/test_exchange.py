"""Three ranks exchange tensors of any size, whatever else connects to their ports."""

import socket
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp

from cluster.sharded_target.exchange import SocketExchange, all_agree
from cluster.sharded_target.messages import LARGEST
from specdec_core.base.files import write_atomically
from specdec_core.base.wire import WireListener

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
        own = torch.full((size, 1), rank + 1.0)
        exchange.sum(own)
        assert (own == 6).all()
    cpu = torch.device("cpu")
    assert all_agree(exchange, cpu, True)
    assert not all_agree(exchange, cpu, rank != 1)
    pieces = exchange.gather(torch.tensor([[rank]], dtype=torch.bfloat16))
    assert [int(piece) for piece in pieces] == ([0, 1, 2] if rank == 0 else [])
    # A chain, twice, of which the first two are done before the last has begun.
    for turn in range(2):
        hidden = torch.full((2, LARGE // 2), float(turn))
        if rank > 0:
            exchange.receive(hidden, rank - 1)
        if rank < RANKS - 1:
            exchange.send(hidden + 1, rank + 1)
        assert (hidden == turn + rank).all()
    exchange.sum(torch.zeros(1))  # all have read what was sent


def test_all_have_the_sum_and_the_vote_the_first_the_pieces_the_next_what_was_sent(tmp_path):
    mp.start_processes(rank_of_three, (str(tmp_path),), RANKS, start_method="fork")
