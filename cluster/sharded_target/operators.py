"""The exchanges of a forward as operators of torch, so that a compiled graph can contain them.

A process holds one rank of one split model, and its operators use the exchange of that rank. The
graphs of all ranks are made from the same code, so they exchange tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from cluster.sharded_target.exchange import Exchange
from specdec_core.base.wire import LinkLost

_exchange: Exchange
_lost: list[LinkLost] = []


def use(exchange: Exchange) -> None:
    """Make this process's operators exchange tensors by `exchange`."""
    global _exchange
    _exchange = exchange


def cause_of(error: Exception) -> Exception:
    """The loss of another rank, if any, else `error`: whatever an operator raises in a graph, the
    graph raises :class:`RuntimeError`."""
    return _lost[0] if _lost else error


def sum_of_ranks(x: Tensor) -> Tensor:
    """The sum of all ranks' tensors, on every rank."""
    summed: Tensor = torch.ops.specdec.sum_of_ranks.default(x)
    return summed


def gathered(x: Tensor) -> Tensor:
    """All ranks' tensors side by side in the last dimension, by rank, on the first rank; on the
    other ranks zeros, one in the last dimension."""
    whole: Tensor = torch.ops.specdec.gathered.default(x)
    return whole


def handed_on(x: Tensor) -> Tensor:
    """Zeros like `x`, which is sent to the next rank."""
    zeros: Tensor = torch.ops.specdec.handed_on.default(x)
    return zeros


def received(like: Tensor) -> Tensor:
    """What the rank before hands on: a tensor of the shape and data type of `like`."""
    tensor: Tensor = torch.ops.specdec.received.default(like)
    return tensor


def _sum_of_ranks(x: Tensor) -> Tensor:
    return _exchange.sum(x)


def _gathered(x: Tensor) -> Tensor:
    pieces = _exchange.gather(x)
    return torch.cat(pieces, dim=-1) if pieces else x.new_zeros((*x.shape[:-1], 1))


def _gathered_shape(x: Tensor) -> Tensor:
    width = 1 if _exchange.rank else x.shape[-1] * _exchange.parts
    return x.new_empty((*x.shape[:-1], width))


def _handed_on(x: Tensor) -> Tensor:
    _exchange.send(x, _exchange.rank + 1)
    return x.new_zeros(x.shape)


def _received(like: Tensor) -> Tensor:
    return _exchange.receive(like, _exchange.rank - 1)


def _noting_loss(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @wraps(run)
    def noting(x: Tensor) -> Tensor:
        try:
            return run(x)
        except LinkLost as error:
            _lost.append(error)
            raise

    return noting


def _same_shape(x: Tensor) -> Tensor:
    """The shape of the output, for torch's compilers."""
    return x.new_empty(x.shape)


_LIBRARY = torch.library.Library("specdec", "FRAGMENT")
for _run, _shape in (
    (_sum_of_ranks, _same_shape),
    (_gathered, _gathered_shape),
    (_handed_on, _same_shape),
    (_received, _same_shape),
):
    _name = _run.__name__.removeprefix("_")
    _LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    _LIBRARY.impl(_name, _noting_loss(_run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"specdec::{_name}", _shape, lib=_LIBRARY)
