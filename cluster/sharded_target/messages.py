"""Calls of a split target's shards and their answers, as bytes: numbers, text and tensors."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from specdec_core.base.errors import UserError
from specdec_core.base.wire import Buffer, LinkLost
from specdec_core.models.runner import Batch

# A call of a shard: the number of a runner, a method of `Shard` and its arguments.
Call = tuple[int, str, tuple[Any, ...]]

LARGEST = 1 << 32  # bytes of a message: the logits of many rows are the largest
_BATCH, _TENSOR, _FAILED = range(3)
_ERRORS = {kind.__name__: kind for kind in (ValueError, UserError, LinkLost)}
_DTYPES = {str(d): d for d in (torch.float32, torch.float16, torch.bfloat16, torch.int64)}


@dataclass(frozen=True)
class ShardFailed:
    """A shard's answer when a call has raised an error. Of an error that is not expected, the kind
    is lost."""

    error: Exception

    @classmethod
    def by(cls, error: Exception) -> ShardFailed:
        """`error`, with its traceback as a note."""
        error.add_note("".join(traceback.format_exception(error)))
        return cls(error)


def encode(message: Any) -> bytes:
    """A list of calls, or an answer."""
    return bytes(msgpack.packb(message, default=_extension))


def decode(data: Buffer) -> Any:
    """What was encoded; tensors are on the CPU, and tuples are lists. Raises :class:`ValueError`
    where it is nothing of ours."""
    return msgpack.unpackb(data, ext_hook=_value, strict_map_key=False)


def _extension(value: Any) -> Any:
    match value:
        case Batch(rows=rows, tokens=tokens, parents=parents, wanted=wanted):
            return msgpack.ExtType(_BATCH, encode((rows, tokens, parents, wanted)))
        case Tensor():
            content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            packed = encode((str(value.dtype), tuple(value.shape), content.data))
            return msgpack.ExtType(_TENSOR, packed)
        case ShardFailed():
            kind, notes = type(value.error).__name__, getattr(value.error, "__notes__", [])
            return msgpack.ExtType(_FAILED, encode((kind, str(value.error), notes)))
        case range() | np.ndarray():
            return list(value)
        case np.integer():
            return int(value)
    raise TypeError(f"{type(value).__name__}: not for a message")


def _value(kind: int, content: bytes) -> Any:
    match kind, decode(content):
        case 0, [rows, tokens, parents, wanted]:
            return Batch(rows, tokens, parents, wanted)
        case 1, [dtype, shape, values]:
            if not values:  # hidden states of a prefill
                return torch.empty(shape, dtype=_DTYPES[dtype])
            return torch.frombuffer(bytearray(values), dtype=_DTYPES[dtype]).view(shape)
        case 2, [name, text, notes]:
            error = _ERRORS.get(name, RuntimeError)(text)
            for note in notes:
                error.add_note(note)
            return ShardFailed(error)
    raise ValueError(f"no message has a part of the kind {kind}")
