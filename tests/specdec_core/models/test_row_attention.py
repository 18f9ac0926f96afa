"""The operator attends to what each token sees, and to nothing else."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from specdec_core.models.cache.blocks import BLOCK
from specdec_core.models.row_attention import operator
from specdec_core.models.row_attention.plans import OperatorPlan, RowTokens, SeenPlaces
from specdec_core.tokens.topology import Topologies

POSITIONS = 300
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TREE = [-1, 0, 0, 1, 1, 2, 5, 5]
# Slots with the positions they hold, how many tokens are fed, and the tree these are the last of.
ROWS = [(3, 200, 1, None), (0, 41, 8, TREE), (1, 120, 40, None), (2, 20, 3, TREE), (5, 1, 1, None)]


@pytest.fixture(autouse=True, scope="module")
def built():
    assert operator.available(DEVICE)


def fed(rows):
    topologies = Topologies(torch.float32, "cpu")
    placed, first = [], 0
    for slot, end, count, tree in rows:
        shape = topologies.chain(count) if tree is None else topologies.find(tree)
        node = 0 if tree is None else len(tree) - count
        last, start = first + count, end - count - node
        placed.append(RowTokens(slot, first, last, start, end, tree, shape, node))
        first = last
    return placed


def expected(query, keys, values, rows, window):  # fmt: skip
    """By whole matrices in float64, with the masks of each row alone."""
    query, keys, values = query.cpu(), keys.cpu(), values.cpu()
    group = query.shape[1] // keys.shape[1]
    parts = []
    for own in rows:
        k, v = (x[own.row, :, : own.end].double() for x in (keys, values))
        k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
        q = query[own.first : own.last].double().transpose(0, 1)
        mask = own.mask(window).double()
        weights = (q @ k.mT * query.shape[-1] ** -0.5 + mask).softmax(dim=-1)
        parts.append((weights @ v).transpose(0, 1))
    return torch.cat(parts)


def attended(query, keys, values, rows, window=None):  # fmt: skip
    plan = OperatorPlan(*SeenPlaces(rows, window).tables(DEVICE))
    return plan.attend(torch.nn.Module(), query.transpose(0, 1)[None], keys, values)[0]


def case(heads, key_heads, size, dtype, kept):
    generator = torch.Generator().manual_seed(heads * size)
    tokens = sum(count for _, _, count, _ in ROWS)
    shapes = [(tokens, heads, size), *2 * [(6, key_heads, POSITIONS, size)]]
    query, keys, values = (torch.randn(shape, generator=generator) for shape in shapes)
    return query.to(DEVICE, dtype), keys.to(DEVICE, kept), values.to(DEVICE, kept)


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize(
    ("heads", "key_heads", "size"),
    [(9, 3, 64), (4, 1, 40), (20, 1, 48), (8, 2, 128), (3, 3, 16), (70, 1, 8)],
)
def test_it_is_the_attention_of_whole_matrices(heads, key_heads, size, window):
    query, keys, values = case(heads, key_heads, size, torch.float32, torch.float32)
    rows = fed(ROWS)
    found = attended(query, keys, values, rows, window)
    wanted = expected(query, keys, values, rows, window)
    torch.testing.assert_close(found.cpu().double(), wanted, atol=2e-6, rtol=2e-5)


def scattered(keys, values):
    """The slots' blocks anywhere in a pool, with NaN in its other blocks, and their places:
    (slots, blocks of a slot) and the pool's keys and values."""
    slots, count = len(keys), -(-POSITIONS // BLOCK)
    blocks = torch.randperm(slots * count + 5, generator=torch.Generator().manual_seed(1))
    blocks = blocks[: slots * count].view(slots, count)
    pools = []
    for store in (keys, values):
        whole = torch.nn.functional.pad(store, (0, 0, 0, count * BLOCK - POSITIONS))
        parts = whole.unflatten(2, (count, BLOCK)).transpose(1, 2)
        pool = torch.full((slots * count + 5, *parts.shape[2:]), torch.nan).to(store)
        pool[blocks] = parts
        pools.append(pool.transpose(0, 1).flatten(1, 2)[None])
    return blocks.int().to(keys.device), *pools


@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(6, 2, 64), (4, 1, 40), (8, 2, 128)])
def test_a_pool_of_blocks_is_attended_to_as_slots_are(heads, key_heads, size, dtype, window):
    query, keys, values = case(heads, key_heads, size, dtype, dtype)
    blocks, *pools = scattered(keys, values)
    tables = SeenPlaces(fed(ROWS), window).tables(DEVICE)
    found = operator.attend(query, *pools, *tables, size**-0.5, blocks)
    wanted = operator.attend(query, keys, values, *tables, size**-0.5)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(6, 2, 64), (4, 1, 40), (3, 3, 96)])
def test_it_rounds_its_output_alone(heads, key_heads, size, dtype, kept):
    query, keys, values = case(heads, key_heads, size, dtype, kept)
    found, rows = attended(query, keys, values, fed(ROWS)), fed(ROWS)
    assert found.dtype == dtype
    wanted = expected(query, keys, values, rows, None)
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.cpu().double(), wanted, atol=tolerance, rtol=tolerance)


def test_a_row_is_bit_for_bit_what_it_is_alone():
    query, keys, values = case(6, 2, 64, torch.bfloat16, torch.bfloat16)
    together = attended(query, keys, values, fed(ROWS))
    bounds = [0]
    for _, _, count, _ in ROWS:
        bounds.append(bounds[-1] + count)
    for row, (first, last) in zip(ROWS, pairwise(bounds), strict=True):
        alone = attended(query[first:last], keys, values, fed([row]))
        assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [2, 7, 63, 64, 65, 130])
@pytest.mark.parametrize("end", [192, 257])
def test_rows_of_any_length_end_where_they_end(end, count, dtype):
    rows = fed([(2, end, count, None), (4, 1 + end // 2, 1, None)])
    generator = torch.Generator().manual_seed(end * count)
    shapes = [(count + 1, 4, 64), *2 * [(6, 2, POSITIONS, 64)]]
    query, keys, values = (torch.randn(x, generator=generator).to(DEVICE, dtype) for x in shapes)
    found = attended(query, keys, values, rows)
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    wanted = expected(query, keys, values, rows, None)
    torch.testing.assert_close(found.cpu().double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_that_sees_nothing_gets_zeros_alone_and_beside_others(dtype):
    query, keys, values = case(6, 2, 64, dtype, dtype)
    sees = [[0, 0, 0, 0, 0], [0, 0, 80, 0, 0], [0, 70, 70, 0, 0], [3, 0, 0, 0, 0]]
    tokens = torch.tensor(sees, dtype=torch.int32, device=DEVICE)
    nodes = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found = operator.attend(query[:4], keys, values, tokens, nodes, 0.125)
    assert found.isfinite().all()
    assert found[[0, 2, 3]].count_nonzero() == 0
    assert found[1].count_nonzero() > 0


@pytest.mark.parametrize("window", [None, 30, 75])
def test_a_path_of_a_tree_may_be_longer_than_a_block(window):
    query, keys, values = case(6, 2, 64, torch.float32, torch.float32)
    deep = [*range(-1, 79), 5, 70]
    rows = fed([(0, 200, 4, deep), (1, 90, 2, deep)])
    found = attended(query[:6], keys, values, rows, window)
    wanted = expected(query[:6], keys, values, rows, window)
    torch.testing.assert_close(found.cpu().double(), wanted, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_token_does_not_see_may_be_anything(dtype):
    query, keys, values = case(6, 2, 64, dtype, dtype)
    rows = fed(ROWS)
    before = attended(query, keys, values, rows)
    held = {slot: end for slot, end, _, _ in ROWS}
    for slot in range(6):
        keys[slot, :, held.get(slot, 0) :] = torch.nan
        values[slot, :, held.get(slot, 0) :] = torch.nan
    assert torch.equal(attended(query, keys, values, rows), before)


def test_large_scores_overflow_nothing():
    query, keys, values = case(6, 2, 64, torch.float32, torch.float32)
    rows = fed(ROWS)
    found = attended(100 * query, 10 * keys, values, rows)
    wanted = expected(100 * query, 10 * keys, values, rows, None)
    torch.testing.assert_close(found.cpu().double(), wanted, atol=2e-3, rtol=2e-3)


def test_a_machine_without_a_compiler_goes_without_it(tmp_path):
    program = (
        "import torch\nfrom specdec_core.models.row_attention import operator\n"
        "print(*[operator.available(torch.device('cpu'))] * 2)"
    )
    environment = {**os.environ, "CXX": "/no/compiler", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
    assert done.stderr.count("goes without its operator") == 1
    assert operator.available_on_cpu()
