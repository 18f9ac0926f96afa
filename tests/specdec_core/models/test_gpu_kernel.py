"""The attention kernel for GPUs, without one: it can be compiled for them, and Triton's interpreter
finds what it should. On a machine with a GPU the operator's own tests run it.

Triton is no requirement on a machine without a GPU; `pip install triton` has these tests run.
"""

import os
import sys
from importlib.util import find_spec

import pytest

from specdec_core.models.cache.blocks import BLOCK
from tests.commands import ran

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
_HOPPER = "cuda", 90, 32

_INTERPRETED = """
import contextlib, torch
from specdec_core.models.row_attention import gpu
from tests.specdec_core.models import test_row_attention as t
torch.cuda.device_of = lambda tensor: contextlib.nullcontext()  # of which there is none
for heads, key_heads, size in [(6, 2, 64), (4, 1, 40), (8, 2, 128), (3, 3, 16)]:
    query, *stores = t.case(heads, key_heads, size, torch.float32, torch.float32)
    blocks, *pools = t.scattered(*stores)
    for window in (None, 1, 50):
        rows = t.fed(t.ROWS)
        tables = t.SeenPlaces(rows, window).tables(torch.device("cpu"))
        wanted = t.expected(query, *stores, rows, window)
        found = gpu.attend(query, *stores, None, *tables, size**-0.5)
        torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=2e-5)
        assert torch.equal(gpu.attend(query, *pools, blocks, *tables, size**-0.5), found)
"""


def test_the_interpreter_finds_the_attention_of_whole_matrices():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran(sys.executable, "-c", _INTERPRETED, env=environment)


@pytest.mark.parametrize("pool_block", [0, BLOCK])
@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_it_can_be_compiled_for_a_gpu(dtype, size, pool_block):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from specdec_core.models.row_attention import gpu

    kernel = gpu._attend
    shapes = {"group": 4, "padded_group": 4, "tile": 4, "size": size, "block": 32}
    shapes |= {"wide": triton.next_power_of_2(size), "pool_block": pool_block}
    constants = {**shapes, "exact": dtype == "fp32"}
    types = dict.fromkeys(("query", "keys", "values", "out"), f"*{dtype}")
    types |= dict.fromkeys(("blocks", "tokens", "nodes"), "*i32") | {"scale": "fp32"}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    compiled = triton.compile(source, target=GPUTarget(*_HOPPER))
    assert compiled.metadata.shared < 227 * 1024  # bytes that a program may have there
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
