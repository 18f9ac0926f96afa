"""Attention in the data type that keys and values are kept in.

On a CPU torch attends in float32 two to five times faster than in bfloat16, so there a cache keeps
float32 whatever the weights are in; the few queries of a forward are converted.

Attention there waits for memory, and padded rows would be read as far as the longest one reaches.
So the tokens of several rows are packed into one sequence without padding, and each row attends to
its own part of the cache (:mod:`specdec_core.models.row_attention`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from specdec_core.models.row_attention.plans import RowMask

ATTENTION = "sdpa_as_cached"


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    if isinstance(attention_mask, RowMask):
        return attention_mask.plan.attend(module, query, key, value, **options), None
    attended, _ = sdpa_attention_forward(
        module, query.to(key.dtype), key, value.to(key.dtype), attention_mask, **options
    )
    return attended.to(query.dtype), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def attends_here(model: PreTrainedModel) -> bool:
    """Whether `model` attends by this module, from now on: where it uses torch's own attention."""
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)
    return bool(config._attn_implementation == ATTENTION)


def cache_dtype(model: PreTrainedModel) -> torch.dtype:
    """The data type to keep the keys and values of `model` in."""
    reduced = model.device.type == "cpu" and model.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if reduced and attends_here(model) else model.dtype
