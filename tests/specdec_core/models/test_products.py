"""Products by the project's operator, and graphs that use it."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_core.models.cache import SlotCache
from specdec_core.models.compiled.packaged import PackagedPacked
from specdec_core.models.compiled.packages import Packages
from specdec_core.models.compiled.runner import CompiledRunner
from specdec_core.models.eager import EagerRunner
from specdec_core.models.pair import resolve_dtypes
from specdec_core.models.products import operator
from specdec_core.models.products.graph import replace_linear_layers
from specdec_core.models.runner import Batch

needs_operator = pytest.mark.skipif(
    not operator.available(), reason="the operator is for AVX-512 with bfloat16, without AMX"
)


def random(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16()


@needs_operator
@pytest.mark.parametrize("rows", [1, 2, 12, 13, 14, 27, 100])
@pytest.mark.parametrize(("columns", "dimensions"), [(32, 2), (64, 96), (160, 30)])
def test_a_product_is_rounded_once(rows, columns, dimensions):
    x, weight = random(rows, dimensions), random(columns, dimensions)
    wanted = x.double() @ weight.double().T
    found = operator.multiply(x, operator.panels(weight))
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=2**-8)


@needs_operator
def test_a_row_is_bit_for_bit_what_it_is_alone():
    x, panels = random(40, 64), operator.panels(random(96, 64))
    together = operator.multiply(x, panels)
    assert all(torch.equal(operator.multiply(row[None], panels)[0], own)
               for row, own in zip(x, together, strict=True))  # fmt: skip


@needs_operator
def test_layers_that_read_the_same_rows_become_one_product_and_others_stay():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(16, 64, bias=False), nn.Linear(16, 32, bias=False)
            self.narrow, self.biased = nn.Linear(16, 24, bias=False), nn.Linear(16, 32)

        def forward(self, x):
            return self.query(x), self.narrow(x), self.key(x), self.biased(x)

    layers = Layers().bfloat16().eval()
    x = random(3, 16)
    with torch.no_grad():
        module = torch.export.export(layers, (x,)).module()
        replace_linear_layers(module)
        targets = [str(node.target) for node in module.graph.nodes]
        assert targets.count("specdec.multiply.default") == 1
        assert targets.count("aten.linear.default") == 2
        assert {name for name, _ in module.named_parameters()} == {
            *("narrow.weight", "biased.weight", "biased.bias")
        }
        for found, wanted in zip(module(x), layers(x), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.long
@needs_operator
def test_a_compiled_model_in_bfloat16_multiplies_by_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16().eval()
    eager = EagerRunner(model, 3, 96)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="running without compiled graphs")
        compiled = CompiledRunner(EagerRunner(model, 3, 96), "weights")
    batch = Batch([0, 1, 2], [[5, 6, 7], [9], [*range(20, 40)]])
    with torch.inference_mode():
        found, wanted = compiled.forward(batch).logits, eager.forward(batch).logits
    assert (found.float() - wanted.float()).norm() < 0.02 * wanted.float().norm()
    graph = next(tmp_path.rglob("*.wrapper.cpp"))
    assert "multiply" in graph.read_text()


@needs_operator
@pytest.mark.parametrize("bias", [False, True])
def test_forwards_are_padded_only_where_another_library_multiplies(bias):
    config = LlamaConfig(attn_implementation="eager")
    packages = Packages(nn.Linear(16, 32, bias=bias).bfloat16(), config, [])
    packed: Any = PackagedPacked(packages, SlotCache(1, 1, 64))
    widths: list[tuple[int, int]] = []

    def record(feed, wanted, *_):
        widths.append((feed.shape[1], len(wanted)))
        return [wanted]

    packed._run = record
    tables = torch.zeros((21, 5), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    plan: Any = SimpleNamespace(tables=lambda device: tables)
    feed = [[1] * 21, [0] * 21, range(21), range(21)]
    [found] = packed.run(feed, [*range(4, 21)], [plan])
    assert found.tolist() == [*range(4, 21)]
    assert widths == [(24, 20) if bias else (21, 17)]


@needs_operator
def test_what_the_operator_multiplies_is_in_its_data_type(tiny_spec):
    """Not what a few eager forwards measured: near a tie they say another type each time."""
    auto = {"device": "cpu", "compile": True, "target_dtype": "auto", "draft_dtype": "auto"}
    runner = tiny_spec.runner.model_copy(update=auto)
    resolved = resolve_dtypes(tiny_spec.model_copy(update={"runner": runner})).runner
    assert (resolved.target_dtype, resolved.draft_dtype) == ("bfloat16", "bfloat16")
