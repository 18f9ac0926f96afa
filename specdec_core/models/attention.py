"""Attention in the data type that keys and values are kept in.

On a CPU torch attends in float32 two to five times faster than in bfloat16, so there a cache keeps
float32 whatever the weights are in; the few queries of a forward are converted to meet it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

_NAME = "sdpa_as_cached"


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    attended, _ = sdpa_attention_forward(
        module, query.to(key.dtype), key, value.to(key.dtype), *args, **options
    )
    return attended.to(query.dtype), None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, sdpa_mask)


def cache_dtype(model: PreTrainedModel) -> torch.dtype:
    """The data type to keep the keys and values of `model` in. Where it differs from the model's
    own, the model attends in it from now on."""
    config = model.config.get_text_config(decoder=True)
    if model.device.type != "cpu" or model.dtype == torch.float32:
        return model.dtype
    if config._attn_implementation == "sdpa":
        model.set_attn_implementation(_NAME)
    return torch.float32 if config._attn_implementation == _NAME else model.dtype
