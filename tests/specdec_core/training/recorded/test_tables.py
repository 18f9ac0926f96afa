"""What a head or a draft begins with is the target's own arithmetic, in any family."""

import pytest
import torch
import transformers
from torch import nn

from specdec_core.training.recorded.features import _tables
from tests.specdec_core.models.test_features import SIZES

HEADS = {"num_key_value_heads": 2, "head_dim": 8}
# The norm before the MLP, and what a norm adds to its weights.
FAMILIES = {
    "llama": (transformers.LlamaConfig(**SIZES), "post_attention_layernorm", 0),
    "gemma2": (transformers.Gemma2Config(**SIZES, **HEADS), "pre_feedforward_layernorm", 1),
    "gemma3": (transformers.Gemma3TextConfig(**SIZES, **HEADS), "pre_feedforward_layernorm", 1),
    "olmo2": (transformers.Olmo2Config(**SIZES), None, 0),
    "gpt-neox": (transformers.GPTNeoXConfig(**SIZES), None, None),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_are_what_they_multiply_by_under_the_names_of_a_llamas(family):
    config, before_mlp, added = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for module in model.modules():
            if "Norm" in type(module).__name__:
                nn.init.normal_(module.weight)
    tables = _tables(model)
    norm = getattr(model.base_model, "norm", None)
    if added is None:  # a norm that subtracts the mean and adds a bias
        assert "norm" not in tables
    else:
        torch.testing.assert_close(
            tables["norm"].float(), norm.weight + added, rtol=0.01, atol=0.01
        )
    layer = model.base_model.layers[-1]
    name = "layer.post_attention_layernorm.weight"
    if before_mlp is None:
        assert name not in tables
    else:
        expected = getattr(layer, before_mlp).weight + added
        torch.testing.assert_close(tables[name].float(), expected, rtol=0.01, atol=0.01)
