"""The exchanges of a forward as operators of torch, so that a compiled graph can contain them.

A process holds one rank of one split model, and its operators use the exchange of that rank. The
graphs of all ranks are made from the same code, so they exchange tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cluster.sharded_target.exchange import Exchange
from specdec_core.base.wire import LinkLost

_Run = Callable[[Tensor], Tensor]

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


def _gathered_shape(x: Tensor) -> Tensor:
    width = 1 if _exchange.rank else x.shape[-1] * _exchange.parts
    return x.new_empty((*x.shape[:-1], width))


_LIBRARY = torch.library.Library("specdec", "FRAGMENT")


def _operator(shape: _Run = lambda x: x.new_empty(x.shape)) -> Callable[[_Run], _Run]:
    """Makes a function an operator of that name. Torch's compilers know its output by `shape`."""

    def define(run: _Run) -> _Run:
        def noting_loss(x: Tensor) -> Tensor:
            try:
                return run(x)
            except LinkLost as error:
                _lost.append(error)
                raise

        name = run.__name__
        _LIBRARY.define(f"{name}(Tensor x) -> Tensor")
        _LIBRARY.impl(name, noting_loss, "CompositeExplicitAutograd")
        torch.library.register_fake(f"specdec::{name}", shape, lib=_LIBRARY)
        operator: _Run = getattr(torch.ops.specdec, name).default
        return operator

    return define


@_operator()
def sum_of_ranks(x: Tensor) -> Tensor:
    """The sum of all ranks' tensors, on every rank."""
    return _exchange.sum(x)


@_operator(_gathered_shape)
def gathered(x: Tensor) -> Tensor:
    """All ranks' tensors side by side in the last dimension, by rank, on the first rank; on the
    other ranks zeros, one in the last dimension."""
    pieces = _exchange.gather(x)
    return torch.cat(pieces, dim=-1) if pieces else x.new_zeros((*x.shape[:-1], 1))


@_operator()
def handed_on(x: Tensor) -> Tensor:
    """Zeros like `x`, which is sent to the next rank."""
    _exchange.send(x, _exchange.rank + 1)
    return x.new_zeros(x.shape)


@_operator()
def received(x: Tensor) -> Tensor:
    """What the rank before hands on: a tensor of the shape and data type of `x`."""
    return _exchange.receive(x, _exchange.rank - 1)
