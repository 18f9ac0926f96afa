"""The project's attention operator, for CPUs and GPUs. Its time depends only on what tokens see."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_core.base.operators import loaded
from specdec_core.models.cache.blocks import BLOCK

SOURCE = Path(__file__).with_name("attend.cpp")
_LIBRARY = torch.library.Library("specdec", "FRAGMENT")
_LIBRARY.define(
    "attend(Tensor query, Tensor keys, Tensor values, Tensor plan, Tensor nodes, float scale)"
    " -> Tensor"
)
_LIBRARY.define(
    "attend_blocks(Tensor query, Tensor keys, Tensor values, Tensor blocks, Tensor plan,"
    " Tensor nodes, float scale) -> Tensor"
)


def available(device: torch.device) -> bool:
    """Whether the operator is there for tensors of a device."""
    if device.type == "cpu":
        return available_on_cpu()
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


@cache
def available_on_cpu() -> bool:
    """Whether the operator is there for CPUs, built where it is missing."""
    without = "attention of several rows goes without its operator"
    return loaded(SOURCE, "the attention of several rows", without)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tokens: Tensor,
    nodes: Tensor,
    scale: float,
    blocks: Tensor | None = None,
) -> Tensor:
    """Attention of tokens, each to what it sees alone.

    Args:
        query: (tokens, heads, head size), bfloat16 or float32; on a GPU float16 too.
        keys: (slots, key heads, positions, head size), of the same types.
        values: the same.
        tokens: (tokens, 5) integers: the slot; the positions [first, end) that it sees of it; and
            the range, first and count, of its further positions in `nodes`. Tokens of a slot are
            neighbours. One that sees nothing gets zeros.
        nodes: positions (n,), integers.
        scale: of the products.
        blocks: for a pooled cache, with `keys` and `values` (1, key heads, positions of all blocks,
            head size): the number of the block for each :data:`BLOCK` positions of a slot, (slots,
            blocks of a slot), integers.

    Returns:
        (tokens, heads, head size), in the queries' data type.

    Raises:
        RuntimeError: heads of this size do not fit into the GPU.
    """
    sees = tokens, nodes, scale
    attended: Tensor
    if blocks is None:
        attended = torch.ops.specdec.attend(query, keys, values, *sees)
    else:
        attended = torch.ops.specdec.attend_blocks(query, keys, values, blocks, *sees)
    return attended


def _on_gpu(
    query: Tensor, keys: Tensor, values: Tensor, tokens: Tensor, nodes: Tensor, scale: float
) -> Tensor:
    from specdec_core.models.row_attention import gpu  # Triton is there with a GPU only

    return gpu.attend(query, keys, values, None, tokens, nodes, scale)


def _blocks_on_gpu(*arguments: Any) -> Tensor:
    from specdec_core.models.row_attention import gpu

    return gpu.attend(*arguments)


def _blocks_on_cpu(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    tokens: Tensor,
    nodes: Tensor,
    scale: float,
) -> Tensor:
    """Attention to a copy with every slot in its own row; only tests use a pool on a CPU."""
    places = (blocks[..., None] * BLOCK + torch.arange(BLOCK)).flatten(1)  # (slots, positions)
    keys, values = (store[0][:, places].transpose(0, 1).contiguous() for store in (keys, values))
    return attend(query, keys, values, tokens, nodes, scale)


def _like(query: Tensor, *_: object) -> Tensor:
    """The shape of the output, for torch's compilers."""
    return query.new_empty(query.shape)


_LIBRARY.impl("attend", _on_gpu, "CUDA")
_LIBRARY.impl("attend_blocks", _blocks_on_gpu, "CUDA")
_LIBRARY.impl("attend_blocks", _blocks_on_cpu, "CPU")
for _name in ("attend", "attend_blocks"):
    torch.library.register_fake(f"specdec::{_name}", _like, lib=_LIBRARY)
