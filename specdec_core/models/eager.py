"""Forwards of any decoder-only transformers model, run eagerly in this process."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from specdec_core.models.attention import cache_dtype
from specdec_core.models.cache import SlotCache
from specdec_core.models.local_runner import LocalRunner
from specdec_core.models.runner import Batch, Output, PaddedOutput
from specdec_core.models.supported import check_supported, context_length
from specdec_core.tokens.topology import Slices, Topologies

# Rows are padded to the widest of the batch, so one that is nearly full writes beyond its end.
_PADDING = 160


class EagerRunner(LocalRunner):
    """A model and its slot cache. Logits are of the first `vocab_size` tokens; unset, of all."""

    def __init__(
        self, model: PreTrainedModel, slots: int, max_length: int, vocab_size: int | None = None
    ) -> None:
        super().__init__()
        self.model = model.eval()
        config = model.config.get_text_config(decoder=True)
        check_supported(config, config.model_type)
        self.device, dtype = model.device, cache_dtype(model)
        self.vocab_size = min(config.vocab_size, vocab_size or config.vocab_size)
        self.max_length = max_length
        limit = context_length(config)
        self.last_position = limit - 1 if limit else max_length + _PADDING
        kinds, arguments = get_layer_types_and_kwargs(config)
        self.cache = SlotCache(len(kinds), slots, max_length + _PADDING, dtype)
        positions = self.cache.positions
        windows = {k: a.get("sliding_window") for k, a in zip(kinds, arguments, strict=True)}
        # A model with layers of one kind takes the mask itself, a mixed one a mask for each kind.
        self.windows: dict[str, int | None] = {
            kind: window if window and window < positions else None
            for kind, window in windows.items()
        }
        self.topologies = Topologies(positions, dtype, self.device)
        # On a CPU, torch attends with one bfloat16 query several times slower than with two.
        reduced = self.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)
        self._least_width = 2 if reduced else 1
        self._all_visible = torch.zeros((1, 1, 1, positions), dtype=dtype, device=self.device)
        accepted = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._hidden: Tensor | None = None
        self._watch: RemovableHandle | None = None

    def expect(self, parents: Sequence[int]) -> None:
        self.topologies.expect(parents)

    def watch_hidden(self, wanted: bool) -> None:
        if wanted and self._watch is None:
            output = self.model.get_output_embeddings()
            self._watch = output.register_forward_pre_hook(self._keep_hidden)
        elif not wanted and self._watch is not None:
            self._watch.remove()
            self._watch = self._hidden = None

    def _keep_hidden(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._hidden = inputs[0]

    def _forward(self, batch: Batch) -> Output:
        rows, tokens = batch.rows, batch.tokens
        width = max(self._least_width, *map(len, tokens))
        window = self.cache.open_window(rows, width)
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens])
        slices = self.topologies.slices([len(row) for row in tokens], width, batch.parents)
        begin = [at - first for at, first in zip(window.offsets, slices.first, strict=True)]
        starts = torch.tensor(begin)[:, None]
        positions = (starts + slices.depths).to(self.device)
        logits = self.model(
            input_ids=ids.to(self.device),
            position_ids=positions.clamp(max=self.last_position),
            attention_mask=self._masks(slices, starts.to(self.device)),
            past_key_values=self.cache,
            use_cache=True,
            **({} if any(batch.counts) else self._last_only),
        ).logits
        self.cache.append(rows, map(len, tokens))
        return PaddedOutput(batch, logits[..., : self.vocab_size], self._hidden)

    def _masks(self, slices: Slices, starts: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive masks (rows, 1, width, end), by kind of layer where there are several: a query
        sees the cached text and, after it, its predecessors (its ancestors in a tree)."""
        masks = {kind: self._mask(slices, starts, w) for kind, w in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, slices: Slices, starts: Tensor, window: int | None) -> Tensor:
        end = self.cache.window.end
        if window is None and slices.single:
            return self._all_visible[..., :end]
        return slices.mask(starts, end, window)
