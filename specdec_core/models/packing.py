"""Linear layers with weights laid out once for this processor.

torch's linear layer on a CPU rearranges its weight for oneDNN at every call. For the few tokens of
a drafting or verifying forward that takes about as long as the product itself, so an inference
process does it once, when a model is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# The layout depends on how many tokens are expected; this one suits 1 as well as 16.
_EXPECTED_TOKENS = 8


def multiplied_dtypes() -> tuple[torch.dtype, ...]:
    """The data types in which oneDNN multiplies on this processor. Elsewhere than on one with
    AVX-512 or with instructions for bfloat16, torch multiplies that type by itself, several tokens
    in up to eight times the time of float32."""
    if not torch.backends.mkldnn.is_available():
        return ()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return (torch.float32,)
    return (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """A linear layer for inference with its weight in oneDNN's layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        # A buffer would be moved, cast or saved with the model, which this layout cannot be.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_TOKENS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.reshape(-1, self.in_features), self._packed, self._bias, "none", [], ""
        )
        return product.view(*x.shape[:-1], self.out_features)


def pack_linear_layers(model: nn.Module) -> None:
    """Replace every linear layer of a CPU model, in place, by one with a packed weight. A layer of
    a data type that has no such layout here is not changed."""
    dtypes = multiplied_dtypes()
    with torch.inference_mode():
        for module in list(model.modules()):
            for name, child in module.named_children():
                # A subclass may do more than a product.
                if type(child) is nn.Linear and child.weight.dtype in dtypes:
                    setattr(module, name, PackedLinear(child))
