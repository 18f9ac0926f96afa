"""Attention in the data type that keys and values are kept in, of whole batches or row by row.

On a CPU torch attends in float32 two to five times faster than in bfloat16, so there a cache keeps
float32 whatever the weights are in; the few queries of a forward are converted to meet it.

Attention there waits for memory: a batch of padded rows reads every row as far as the longest one
reaches. So the tokens of several rows are packed into one sequence, which has no padding, and each
row attends by itself to its own part of the cache. What a row sees travels with the mask
(:class:`RowMask`), which models pass on as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

_NAME = "sdpa_as_cached"


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens [first, last) of a packed forward: they are of slot `row` and see positions
    [begin, end) of it, under an additive `mask` (1, 1, tokens, end - begin) if there is one."""

    first: int
    last: int
    row: int
    begin: int
    end: int
    mask: Tensor | None


class RowMask(Tensor):
    """The mask of a packed forward: its `spans`. As a tensor it is empty."""

    spans: Sequence[Span]

    @classmethod
    def of(cls, spans: Sequence[Span]) -> RowMask:
        mask = torch.empty((1, 1, 0, 0)).as_subclass(cls)
        mask.spans = spans
        return mask


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    query_dtype, query, value = query.dtype, query.to(key.dtype), value.to(key.dtype)
    if isinstance(attention_mask, RowMask):
        parts = []
        for span in attention_mask.spans:
            row, seen = slice(span.row, span.row + 1), slice(span.begin, span.end)
            parts.append(
                sdpa_attention_forward(
                    module,
                    query[:, :, span.first : span.last],
                    key[row, :, seen],
                    value[row, :, seen],
                    span.mask,
                    *args,
                    **options,
                )[0]
            )
        attended = torch.cat(parts, dim=1)
    else:
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, *args, **options
        )
    return attended.to(query_dtype), None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, sdpa_mask)


def attends_here(model: PreTrainedModel) -> bool:
    """Whether `model` attends by this module, from now on: on a CPU, where it uses torch's own
    attention."""
    config = model.config.get_text_config(decoder=True)
    if model.device.type == "cpu" and config._attn_implementation == "sdpa":
        model.set_attn_implementation(_NAME)
    return bool(config._attn_implementation == _NAME)


def cache_dtype(model: PreTrainedModel) -> torch.dtype:
    """The data type to keep the keys and values of `model` in."""
    reduced = model.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if reduced and attends_here(model) else model.dtype
