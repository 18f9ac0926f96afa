"""The attention operator on GPUs, as one Triton kernel.

A program attends a tile of queries, the heads of neighbouring tokens that share a slot and a key
head, to that slot's positions, block by block with a running softmax. Blocks begin at multiples of
their size, and a block that a token does not see changes nothing. So a token's output is the same
bit for bit in any batch. Afterwards each query attends to its further positions, the ancestors in a
tree, one after the other.

Tiles are found from the table of tokens on the device, so a CUDA graph of the kernel serves any
rows, trees and contexts.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from specdec_core.models.cache.blocks import BLOCK

_FEW = 64  # tokens up to which tiles are the smallest that the matrix units take
_LEAST_TILE, _TILE = 16, 64  # queries
_BLOCK_BYTES = 16 * 1024  # of keys at a time
_LOG2_E = 1.4426950408889634


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor | None,
    tokens: Tensor,
    nodes: Tensor,
    scale: float,
) -> Tensor:
    """See :func:`specdec_core.models.row_attention.operator.attend`."""
    count, heads, size = query.shape
    group = heads // keys.shape[1]
    wide, padded = triton.next_power_of_2(size), triton.next_power_of_2(group)
    exact = torch.float32 in (query.dtype, keys.dtype)
    block = _BLOCK_BYTES // (wide * (4 if exact else 2))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    tile = max((_LEAST_TILE if count <= _FEW else _TILE) // padded, 1)
    try:
        with torch.cuda.device_of(query):
            _attend[(count, keys.shape[1])](
                *(query, keys, values, tokens if blocks is None else blocks, tokens, nodes, out),
                *(scale * _LOG2_E, count, 0 if blocks is None else blocks.stride(0)),
                *(query.stride(0), query.stride(1), out.stride(0), out.stride(1)),
                *keys.stride()[:3],
                *values.stride()[:3],
                group=group,
                padded_group=max(padded, _LEAST_TILE // tile),
                tile=tile,
                size=size,
                wide=max(wide, 16),
                block=min(max(block, 16), BLOCK),
                pool_block=0 if blocks is None else BLOCK,
                exact=exact,
            )
    except triton.TritonError as error:
        raise RuntimeError(f"no attention kernel for heads of {size}: {error}") from error
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _attend(  # type: ignore[no-untyped-def]
    query, keys, values, blocks, tokens, nodes, out, scale, count, slot_blocks,
    query_token, query_head, out_token, out_head,
    key_slot, key_head, key_place,
    value_slot, value_head, value_place,
    group: tl.constexpr, padded_group: tl.constexpr, tile: tl.constexpr,
    size: tl.constexpr, wide: tl.constexpr, block: tl.constexpr, pool_block: tl.constexpr,
    exact: tl.constexpr,
):  # fmt: skip
    """A program for each token and key head. Only the program of a tile's first token works; a tile
    has the tokens of one slot up to the next multiple of `tile`. With a `pool_block`, a multiple of
    `block`, the positions of a slot are in blocks of that size, numbered in `blocks`."""
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tokens + token * 5)
    before = tl.load(tokens + token * 5 - 5, mask=token % tile != 0, other=-1)
    if before == slot:
        return
    queries = tl.arange(0, tile * padded_group)
    own = token + queries // padded_group
    member = queries % padded_group
    inside = (own < count) & (own < (token // tile + 1) * tile) & (member < group)
    row = tokens + own * 5
    inside = inside & (tl.load(row, mask=inside, other=-1) == slot)
    first = tl.load(row + 1, mask=inside, other=0)
    end = tl.load(row + 2, mask=inside, other=0)
    dims = tl.arange(0, wide)
    filled = inside[:, None] & (dims < size)[None]
    own_head = head * group + member
    at_query = own.to(tl.int64)[:, None] * query_token + own_head[:, None] * query_head
    asked = tl.load(query + at_query + dims[None], mask=filled, other=0)
    if exact:
        asked = asked.to(tl.float32)
    keys += head * key_head
    values += head * value_head
    if pool_block:
        blocks += slot.to(tl.int64) * slot_blocks
    else:
        keys += slot.to(tl.int64) * key_slot
        values += slot.to(tl.int64) * value_slot

    never = -1e30
    most = tl.full([tile * padded_group], never, tl.float32)
    weight = tl.zeros([tile * padded_group], tl.float32)
    total = tl.zeros([tile * padded_group, wide], tl.float32)

    low = tl.min(tl.where(end > first, first, 2147483647))
    high = tl.max(end)
    for start in range(tl.minimum(low, high) // block * block, high, block):
        places = start + tl.arange(0, block)
        held = ((places >= low) & (places < high))[:, None] & (dims < size)[None]
        at = places.to(tl.int64)[:, None]
        if pool_block:
            number = tl.load(blocks + start // pool_block).to(tl.int64)
            at += (number - start // pool_block) * pool_block
        key = tl.load(keys + at * key_place + dims[None], mask=held, other=0)
        value = tl.load(values + at * value_place + dims[None], mask=held, other=0)
        if exact:
            key, value = key.to(tl.float32), value.to(tl.float32)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        seen = (places[None] >= first[:, None]) & (places[None] < end[:, None])
        scores = tl.where(seen, scores, never)
        higher = tl.maximum(most, tl.max(scores, 1))
        shares = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
        decay = tl.exp2(most - higher)
        weight = weight * decay + tl.sum(shares, 1)
        total = total * decay[:, None]
        total += tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        most = higher

    further = tl.load(row + 4, mask=inside, other=0)
    path = nodes + tl.load(row + 3, mask=inside, other=0)
    for step in range(0, tl.max(further)):
        has = step < further
        place = tl.load(path + step, mask=has, other=0)
        if pool_block:
            number = tl.load(blocks + place // pool_block, mask=has, other=0)
            place = number * pool_block + place % pool_block
        at = place.to(tl.int64)[:, None]
        held = has[:, None] & filled
        key = tl.load(keys + at * key_place + dims[None], mask=held, other=0)
        value = tl.load(values + at * value_place + dims[None], mask=held, other=0)
        score = tl.sum(asked.to(tl.float32) * key.to(tl.float32), 1) * scale
        score = tl.where(has, score, never)
        higher = tl.maximum(most, score)
        share = tl.where(has, tl.exp2(score - higher), 0.0)
        decay = tl.exp2(most - higher)
        weight = weight * decay + share
        total = total * decay[:, None] + share[:, None] * value.to(tl.float32)
        most = higher

    attended = total / tl.where(weight > 0, weight, 1.0)[:, None]
    at_out = own.to(tl.int64)[:, None] * out_token + own_head[:, None] * out_head
    tl.store(out + at_out + dims[None], attended.to(out.dtype.element_ty), mask=filled)
