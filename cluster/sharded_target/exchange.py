"""How the ranks of a split model hand each other what they have computed.

All of them do the same in the same order, as in `torch.distributed`.
"""

from __future__ import annotations

from collections import deque
from contextlib import closing
from functools import reduce
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from specdec_core.base.wire import PATIENCE, LinkLost, Listener, Wire, connect

COMING = 60.0  # seconds that others may take to connect, once all know where
SMALL = 32 << 10  # bytes that a socket takes whole, whether or not the other end reads


class Exchange(Protocol):
    """Rank `rank` of `parts`."""

    rank: int
    parts: int

    def sum(self, tensor: Tensor) -> None:
        """Add up the `tensor` of every rank, in place, for all."""
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's, by rank, for the first one; the others get nothing."""
        ...

    def send(self, tensor: Tensor, to: int) -> None: ...

    def receive(self, into: Tensor, by: int) -> None:
        """Fill `into` with what that rank sends."""
        ...


class NcclExchange:
    """By the default process group: on GPUs."""

    def __init__(self, rank: int, parts: int) -> None:
        self.rank, self.parts = rank, parts

    def sum(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        pieces = [torch.empty_like(tensor) for _ in range(self.parts)] if self.rank == 0 else []
        dist.gather(tensor, pieces or None, dst=0)
        return pieces

    def send(self, tensor: Tensor, to: int) -> None:
        dist.send(tensor, to)

    def receive(self, into: Tensor, by: int) -> None:
        dist.recv(into, by)


def _as_it_is(data: Any) -> Any:
    return data


class SocketExchange:
    """By sockets from every rank to every other: on CPUs, where a sum of a few kilobytes by gloo
    takes milliseconds whenever its own thread spins for a lock that another on its core holds.

    The default process group only tells the ranks each other's addresses; `host` is this one's.
    """

    def __init__(self, host: str, rank: int, parts: int) -> None:
        self.rank, self.parts = rank, parts
        self._wires: dict[int, Wire] = {}
        # More may come at once than is asked for.
        self._arrived: list[deque[bytearray]] = [deque() for _ in range(parts)]
        with closing(Listener("", _as_it_is, _as_it_is, patience=None)) as listener:
            addresses = [("", 0, b"")] * parts
            dist.all_gather_object(addresses, (host, listener.port, listener.key))
            for other in range(rank):
                address = addresses[other]
                self._wires[other] = connect(*address, _as_it_is, _as_it_is, patience=None)
                self._wires[other].send(b"%d" % rank)
            while len(self._wires) < parts - 1:
                if (wire := listener.accept(COMING)) is None:
                    raise LinkLost(f"rank {rank}: not all other ranks have come")
                name, *first = wire.receive(PATIENCE)
                self._wires[int(name)] = wire
                self._arrived[int(name)] += first

    def sum(self, tensor: Tensor) -> None:
        if tensor.nbytes <= SMALL:
            for other in self._wires:
                self.send(tensor, other)
            tensor.copy_(reduce(torch.add, self._everybodys(tensor)))
        # By way of the first: two that send more at once would both wait.
        elif self.rank == 0:
            tensor.copy_(reduce(torch.add, self._everybodys(tensor)))
            for other in self._wires:
                self.send(tensor, other)
        else:
            self.send(tensor, 0)
            self.receive(tensor, 0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        if self.rank == 0:
            return self._everybodys(tensor)
        self.send(tensor, 0)
        return []

    def send(self, tensor: Tensor, to: int) -> None:
        self._wires[to].send(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

    def receive(self, into: Tensor, by: int) -> None:
        into.copy_(self._next(by, into))

    def _everybodys(self, own: Tensor) -> list[Tensor]:
        """By rank, so that all who add them up find the same."""
        ranks = range(self.parts)
        return [own if rank == self.rank else self._next(rank, own) for rank in ranks]

    def _next(self, by: int, like: Tensor) -> Tensor:
        arrived = self._arrived[by]
        while not arrived:
            arrived += self._wires[by].receive(None)
        return torch.frombuffer(arrived.popleft(), dtype=like.dtype).view(like.shape)
