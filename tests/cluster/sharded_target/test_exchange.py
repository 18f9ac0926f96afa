"""Three ranks exchange tensors of any size."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cluster.sharded_target.exchange import SocketExchange, all_agree

RANKS = 3
LARGE = 1 << 21  # 8 MB: more than sockets hold


def rank_of_three(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    exchange = SocketExchange("127.0.0.1", rank, RANKS)
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
    dist.barrier()
    dist.destroy_process_group()


def test_all_have_the_sum_and_the_vote_the_first_the_pieces_the_next_what_was_sent(
    tmp_path: Path,
) -> None:
    mp.start_processes(rank_of_three, (str(tmp_path),), RANKS, start_method="fork")
