"""Packed weights compute what the plain ones do."""

import pytest
import torch
from torch import nn

from specdec_core.engine import Engine, Request
from specdec_core.models.packing import PackedLinear, multiplied_dtypes, pack_linear_layers
from specdec_core.models.pair import load_pair, resolve_dtypes

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


@pytest.mark.parametrize("dtype", multiplied_dtypes())
@pytest.mark.parametrize(("bias", "shape"), [(True, (1, 1)), (False, (2, 300))])
def test_a_packed_layer_gives_the_layers_output(dtype, bias, shape):
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, bias=bias).to(dtype)
    x = torch.randn(*shape, 24).to(dtype)
    with torch.inference_mode():
        found = PackedLinear(linear)(x)
        expected = linear(x)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    atol = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def test_only_plain_linear_layers_are_replaced():
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict(
        {"plain": nn.Linear(4, 4), "special": Special(4, 4), "wide": nn.Linear(4, 4).double()}
    )
    pack_linear_layers(model)
    kinds = {name: type(module) for name, module in model.items()}
    assert kinds == {"plain": PackedLinear, "special": Special, "wide": nn.Linear}


def test_a_processor_that_does_not_multiply_bfloat16_takes_float32(tiny_spec, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr("specdec_core.models.pair._CLEARLY", 1e9)  # bfloat16 wins any measurement
    assert multiplied_dtypes() == (torch.float32,)
    layer = nn.ModuleDict({"only": nn.Linear(4, 4).bfloat16()})
    pack_linear_layers(layer)
    assert type(layer["only"]) is nn.Linear
    resolved = resolve_dtypes(tiny_spec.with_runner(device="cpu", target_dtype="auto"))
    assert resolved.runner.target_dtype == "float32"


def test_a_pair_decodes_the_same_tokens_packed_and_plain(tiny_spec):
    outputs = []
    for pack in (True, False):
        pair = load_pair(tiny_spec.with_runner(pack=pack, device="cpu"))
        assert pack == any(isinstance(m, PackedLinear) for m in pair.target.modules())
        requests = [Request(str(n), tuple(range(5, 5 + n)), 32, ignore_eos=True) for n in (3, 20)]
        outputs.append([g.tokens for g in Engine(pair).generate(requests)])
    assert outputs[0] == outputs[1]
