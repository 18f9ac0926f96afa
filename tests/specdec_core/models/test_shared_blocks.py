"""Rows of the cache that begin alike hold that beginning once, and never change one another."""

import random

import pytest
import torch

from specdec_core.base.errors import UserError
from specdec_core.models.cache import PooledCache, SlotCache, slots
from specdec_core.models.cache import pooled as pool_cache
from specdec_core.models.cache.blocks import BLOCK

LAYERS, SLOTS, HEADS, SIZE, POSITIONS = 2, 4, 2, 64, 8 * BLOCK


def write(cache, row, states):
    """Append states (tokens, heads, size) to a row of every layer, as keys, and negated values."""
    packed = states.transpose(0, 1)[None]
    cache.open_window([row], [len(states)])
    for number, layer in enumerate(cache.layers):
        layer.update(packed + number, -packed - number)
    cache.append([row], [len(states)])


def pooled(tokens, slots=SLOTS):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return PooledCache(LAYERS, slots, POSITIONS, device, torch.float32, tokens)


def held(cache, row, count):
    """The keys and values (tokens, heads, size) of a row in every layer."""
    if not count:
        return [torch.zeros(0, HEADS, SIZE)] * (2 * len(cache.layers))
    at, places = cache.at([row] * count, range(count))
    return [store.tensor.cpu()[at, :, places] for layer in cache.held() for store in layer.stores]


def saved(cache):
    """Blocks that are held for another row, too."""
    if not isinstance(cache, PooledCache):
        return 0
    return sum(map(len, cache.blocks.rows)) - len({n for held in cache.blocks.rows for n in held})


@pytest.mark.parametrize(
    ("kind", "amount"), [*(("rows", n) for n in (0, 1024)), *(("pool", n) for n in (None, 320, 1))]
)
def test_rows_that_share_a_beginning_never_change_one_another(kind, amount, monkeypatch):
    # Against copies, through any forks, cuts and writes; rows give back more or less memory.
    chance = random.Random(0)
    if kind == "rows":
        monkeypatch.setattr(slots, "_SPARE", amount)
    opened = SlotCache(LAYERS, SLOTS, POSITIONS, torch.float32)
    cache = opened if kind == "rows" else pooled(amount)
    texts = [torch.zeros(0, HEADS, SIZE) for _ in range(SLOTS)]
    write(cache, 0, texts[0].new_zeros(1, HEADS, SIZE))
    cache.truncate(0, 0)
    shared = 0
    for _ in range(400):
        row = chance.randrange(SLOTS)
        match chance.choice(["write", "write", "cut", "fork", "keep"]):
            case "write" if len(texts[row]) < POSITIONS:
                count = chance.randint(1, min(3 * BLOCK, POSITIONS - len(texts[row])))
                new = torch.randn(count, HEADS, SIZE)
                write(cache, row, new)
                texts[row] = torch.cat([texts[row], new])
            case "cut":
                length = chance.randint(0, len(texts[row]))
                cache.truncate(row, length)
                texts[row] = texts[row][:length]
            case "fork":
                other = chance.randrange(SLOTS)
                length = chance.randint(0, len(texts[row]))
                cache.fork(row, [other], [length])
                texts[other] = texts[row][:length].clone()
            case "keep" if len(texts[row]) + 4 <= POSITIONS:
                start, new = len(texts[row]), torch.randn(4, HEADS, SIZE)
                write(cache, row, new)
                cache.keep(row, start, [1, 3])
                texts[row] = torch.cat([texts[row], new[[1, 3]]])
        shared = max(shared, saved(cache))
        for each, text in enumerate(texts):
            assert cache.lengths[each] == len(text)
            states = held(cache, each, len(text))
            for number, (keys, values) in enumerate(zip(states[::2], states[1::2], strict=True)):
                assert torch.equal(keys, text + number)
                assert torch.equal(values, -keys)
    if isinstance(cache, PooledCache):
        assert shared >= 6
        assert (cache.version > 0) == (amount is not None)
        for row in range(SLOTS):
            cache.truncate(row, 0)
        assert cache.blocks.free == cache.blocks.size


def test_a_pool_holds_a_common_beginning_once_and_grows_for_what_is_written_after_it():
    cache = pooled(6 * BLOCK, slots=3)
    write(cache, 0, torch.randn(6 * BLOCK, HEADS, SIZE))
    cache.fork(0, [1, 2], [6 * BLOCK, 5 * BLOCK])
    assert (cache.version, cache.blocks.free) == (0, 3)  # a block more for each row
    for row in (0, 1, 2):
        write(cache, row, torch.randn(BLOCK, HEADS, SIZE))
    assert (cache.version, cache.blocks.free) == (0, 0)
    before = held(cache, 0, 7 * BLOCK)
    write(cache, 1, torch.randn(1, HEADS, SIZE))
    assert (cache.version, cache.blocks.size) == (1, 9 + 9 // 2)
    assert all(map(torch.equal, before, held(cache, 0, 7 * BLOCK)))


def test_a_pool_that_cannot_grow_loses_nothing(monkeypatch):
    cache = pooled(BLOCK, slots=2)
    write(cache, 0, torch.randn(2 * BLOCK, HEADS, SIZE))
    before, zeros, room = held(cache, 0, 2 * BLOCK), pool_cache._zeros, [True, False]

    def short(*arguments):
        if not room.pop(0):
            raise UserError("a cache does not fit")
        return zeros(*arguments)

    monkeypatch.setattr(pool_cache, "_zeros", short)
    with pytest.raises(UserError, match="does not fit"):
        write(cache, 1, torch.randn(3 * BLOCK, HEADS, SIZE))
    assert cache.lengths == [2 * BLOCK, 0]
    write(cache, 1, torch.randn(BLOCK, HEADS, SIZE))  # for which there is room
    monkeypatch.undo()
    text = torch.randn(2 * BLOCK, HEADS, SIZE)
    write(cache, 1, text)
    assert all(map(torch.equal, before, held(cache, 0, 2 * BLOCK)))
    assert torch.equal(held(cache, 1, 3 * BLOCK)[0][BLOCK:], text)
