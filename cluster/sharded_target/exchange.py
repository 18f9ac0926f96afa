"""How the ranks of a split model exchange tensors.

As in `torch.distributed`, all ranks make the same calls in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import closing
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.sharded_target.messages import LARGEST
from specdec_core.base.wire import LinkLost, Wire, WireListener, connect

Address = tuple[str, int, bytes]  # host, port and key of a listener
COMING = 60.0  # seconds that other ranks may take to connect, once all have their addresses
SMALL = 32 << 10  # bytes that a socket buffers even if the other end does not read


def all_agree(exchange: Exchange, device: torch.device, own: bool) -> bool:
    """Whether every rank's `own` is true; exchanged by a tensor on `device`."""
    votes = exchange.sum(torch.tensor([float(own)], device=device))
    return round(votes.item()) == exchange.parts


class NcclExchange:
    """Rank `rank` of `parts`, through the default process group; for GPUs."""

    def __init__(self, rank: int, parts: int) -> None:
        self.rank, self.parts = rank, parts

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, on every rank."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """All ranks' tensors, by rank, on the first rank; an empty list on the other ranks."""
        tensor = tensor.contiguous()
        pieces = [torch.empty_like(tensor) for _ in range(self.parts)] if self.rank == 0 else []
        dist.gather(tensor, pieces or None, dst=0)
        return pieces

    def send(self, tensor: Tensor, to: int) -> None:
        dist.send(tensor.contiguous(), to)

    def receive(self, like: Tensor, by: int) -> Tensor:
        """What rank `by` sends: a tensor of the shape and data type of `like`."""
        received = like.new_empty(like.shape)
        dist.recv(received, by)
        return received


class SocketExchange:
    """Through a socket between every two ranks; for CPUs. With gloo a sum of a few kilobytes takes
    milliseconds when its thread spins for a lock that another thread on its core holds.

    `addresses` has the listener of each rank; this rank's listener is closed when all wires exist.
    """

    def __init__(self, listener: WireListener, rank: int, addresses: Sequence[Address]) -> None:
        self.rank, self.parts = rank, len(addresses)
        self._wires: dict[int, Wire] = {}
        # A message may arrive together with the ones after it.
        self._arrived: list[deque[bytearray]] = [deque() for _ in addresses]
        with closing(listener):
            for other in range(rank):
                self._wires[other] = connect(*addresses[other], LARGEST, patience=None)
                self._wires[other].send(b"%d" % rank)
            while len(self._wires) < self.parts - 1:
                wire = listener.accept(COMING)
                if wire is None or not (arrived := wire.receive(COMING)):
                    raise LinkLost(f"rank {rank}: not all other ranks have come")
                name, *first = arrived
                self._wires[int(name)] = wire
                self._arrived[int(name)] += first

    def sum(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        if tensor.nbytes <= SMALL:
            for other in self._wires:
                self.send(tensor, other)
            return self._total(tensor)
        # Through the first rank: two ranks that both send more than sockets buffer would deadlock.
        if self.rank == 0:
            total = self._total(tensor)
            for other in self._wires:
                self.send(total, other)
            return total
        self.send(tensor, 0)
        return self.receive(tensor, 0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        if self.rank == 0:
            return self._of_all_ranks(tensor)
        self.send(tensor, 0)
        return []

    def send(self, tensor: Tensor, to: int) -> None:
        self._wires[to].send(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

    def receive(self, like: Tensor, by: int) -> Tensor:
        arrived = self._arrived[by]
        while not arrived:
            arrived += self._wires[by].receive(None)
        return torch.frombuffer(arrived.popleft(), dtype=like.dtype).view(like.shape)

    def _total(self, tensor: Tensor) -> Tensor:
        return reduce(torch.add, self._of_all_ranks(tensor))

    def _of_all_ranks(self, tensor: Tensor) -> list[Tensor]:
        """All ranks' tensors in the same order, so that all sums are equal to the last bit."""
        ranks = range(self.parts)
        return [tensor if rank == self.rank else self.receive(tensor, rank) for rank in ranks]


Exchange = NcclExchange | SocketExchange
