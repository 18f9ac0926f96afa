"""One forward pass of padded rows as a function of tensors alone: what gets compiled."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from specdec_core.models.confidence import most_likely


class PaddedStep(nn.Module):
    """`model` behind the interface of a graph.

    `windows` are the sliding windows (or None) by kind of layer, `last_position` the last one that
    the model can tell apart, `vocab_size` the tokens to give logits of. A `draft` also says how
    sure it is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Mapping[str, int | None],
        last_position: int,
        vocab_size: int,
        draft: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.windows, self.draft = model, dict(windows), draft
        self.last_position, self.vocab_size = last_position, vocab_size
        # What the output layer reads; one, so that eager forwards of the model leave no more.
        self._read: deque[Tensor] = deque(maxlen=1)
        output = model.get_output_embeddings()
        output.register_forward_pre_hook(lambda _, inputs: self._read.append(inputs[0]))

    def forward(
        self,
        feed: Tensor,
        sees: Sequence[Tensor],
        columns: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Append tokens to the rows of a cache, in place.

        Args:
            feed: (rows, 2, 1 + width) integers. Row by row, first the cache position that the
                tokens are written from and the tokens, then the position where their tree begins
                and the tokens' depths in it.
            sees: for each kind of layer, who sees the text and the tree's nodes, additive
                (rows, width, 1 + nodes + 1); see
                :meth:`specdec_core.tokens.topology.Topology.mask`.
            columns: 0, 1, … (end,), the cache positions that are attended to.
            keys: of each layer (rows, heads, positions, head size).
            values: alike.

        Returns:
            Logits (rows, width, vocabulary), the most likely tokens (rows, width), what the output
            layer read (rows, width, dimension) and, of a draft, the probabilities of those tokens
            (rows, width).
        """
        writes, starts = feed[:, 0, :1], feed[:, 1, :1]
        ids, depths = feed[:, 0, 1:], feed[:, 1, 1:]
        rows = torch.arange(feed.shape[0], device=feed.device)[:, None]
        places = writes + torch.arange(ids.shape[1], device=feed.device)
        positions = starts + depths
        masks = {
            kind: _mask(own, starts, positions, columns, window)
            for own, (kind, window) in zip(sees, self.windows.items(), strict=True)
        }
        cache = Cache(
            layers=[
                _Layer(own_keys, own_values, rows, places, columns.shape[0])
                for own_keys, own_values in zip(keys, values, strict=True)
            ]
        )
        self._read.clear()
        output = self.model(
            input_ids=ids,
            position_ids=positions.clamp(max=self.last_position),
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            past_key_values=cache,
            use_cache=True,
        )
        hidden = self._read.pop()
        logits = output.logits[..., : self.vocab_size]
        if not self.draft:
            return logits, logits.max(dim=-1).indices, hidden
        chosen, confidence = most_likely(logits)
        return logits, chosen, hidden, confidence


def _mask(
    sees: Tensor, starts: Tensor, positions: Tensor, columns: Tensor, window: int | None
) -> Tensor:
    """The additive mask (rows, 1, width, end), as part of the graph: what
    :meth:`specdec_core.tokens.topology.Slices.mask` makes."""
    index = (columns - starts + 1).clamp(0, sees.shape[2] - 1)
    mask = sees.gather(2, index[:, None].expand(-1, sees.shape[1], -1))
    if window is not None:
        mask = mask.masked_fill(
            positions[..., None] - columns >= window, torch.finfo(mask.dtype).min
        )
    return mask[:, None]


class _Layer(CacheLayerMixin):
    """A layer of the slot cache whose place to write to is a tensor."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(
        self, keys: Tensor, values: Tensor, rows: Tensor, places: Tensor, end: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        self.keys, self.values, self.is_initialized = keys, values, True
        self._at, self._end = (rows, slice(None), places), end

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the cache is there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys[self._at] = key_states.transpose(1, 2).to(self.keys.dtype)
        self.values[self._at] = value_states.transpose(1, 2).to(self.values.dtype)
        return self.keys[:, :, : self._end], self.values[:, :, : self._end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._end, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]
