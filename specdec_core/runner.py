"""ModelRunner: forward a few tokens of a few slots, keep what was accepted.

The seam between the engine and whatever executes a model. This one runs any decoder-only
transformers model eagerly in this process.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from specdec_core.errors import UserError
from specdec_core.kv_cache import SlotCache

# Rows of a batch are padded to the widest; a row close to its end then writes beyond it.
_PADDING = 160
_PREFILL_CHUNK = 512
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


def check_supported(config: object, name: str) -> None:
    """Refuse, in one line, a model that the slot cache cannot serve exactly."""
    config = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{name}: an encoder-decoder model; only decoder-only models are supported")
    if config.model_type in {"bloom", "mpt"} or getattr(config, "alibi", False):
        raise UserError(
            f"{name}: {config.model_type} uses ALiBi positions, which are not supported"
        )
    try:
        kinds = set(get_layer_types_and_kwargs(config)[0])
    except AttributeError:
        raise UserError(f"{name}: {config.model_type} is not a decoder-only model") from None
    if unsupported := sorted(kinds - _SUPPORTED_LAYERS):
        raise UserError(
            f"{name}: {config.model_type} has layers of kind {', '.join(unsupported)};"
            " only full and sliding attention are supported"
        )


def context_length(config: object) -> int | None:
    """Positions the model can tell apart, where its configuration says."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


class ModelRunner:
    """One model and its slot cache.

    `lengths[row]` is the number of cached tokens of a row; `max_length` how many a row can hold.
    """

    def __init__(self, model: PreTrainedModel, slots: int, max_length: int) -> None:
        self.model = model.eval()
        config = model.config.get_text_config(decoder=True)
        check_supported(config, config.model_type)
        self.device, self.dtype = model.device, model.dtype
        self.vocab_size: int = config.vocab_size
        self.max_length = max_length
        limit = context_length(config)
        self._last_position = limit - 1 if limit else max_length + _PADDING
        kinds, arguments = get_layer_types_and_kwargs(config)
        windows = {k: a.get("sliding_window") for k, a in zip(kinds, arguments, strict=True)}
        # A model with layers of one kind takes the mask itself, a mixed one a mask for each kind.
        self._windows: dict[str, int | None] = windows
        self.cache = SlotCache(len(kinds), slots, max_length + _PADDING)
        positions = self.cache.positions
        self._columns = torch.arange(positions, device=self.device)
        # On a CPU, torch attends with one bfloat16 query several times slower than with two.
        reduced = self.device.type == "cpu" and self.dtype in (torch.bfloat16, torch.float16)
        self._least_width = 2 if reduced else 1
        self._blocked = torch.finfo(self.dtype).min
        self._all_visible = torch.zeros((1, 1, 1, positions), dtype=self.dtype, device=self.device)
        accepted = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.hidden: Tensor | None = None
        self._watch: RemovableHandle | None = None

    def watch_hidden(self, wanted: bool) -> None:
        """Whether forwards leave behind, in `hidden` (rows, width, dimension), what the output
        layer read: the model's last hidden states."""
        if wanted and self._watch is None:
            output = self.model.get_output_embeddings()
            self._watch = output.register_forward_pre_hook(self._keep_hidden)
        elif not wanted and self._watch is not None:
            self._watch.remove()
            self._watch = self.hidden = None

    def _keep_hidden(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.hidden = inputs[0]

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @torch.inference_mode()
    def forward(
        self,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Append `tokens[i]` to row `rows[i]` and return logits of shape (rows, width, vocabulary).

        Ragged rows are padded to the widest; entries past a row's own tokens mean nothing. With
        `parents`, row i's tokens form a tree: token j follows token `parents[i][j]`, or the cached
        prefix when that is -1, and sees only its ancestors.
        """
        logits = self._run(rows, tokens, parents).logits
        for row, own in zip(rows, tokens, strict=True):
            self.lengths[row] += len(own)
        return logits[:, : max(map(len, tokens))]

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Append `tokens[i]` to row `rows[i]` without computing logits, a chunk at a time."""
        for start in range(0, max(map(len, tokens), default=0), _PREFILL_CHUNK):
            chunks = {
                row: own[start : start + _PREFILL_CHUNK]
                for row, own in zip(rows, tokens, strict=True)
                if len(own) > start
            }
            self._run(list(chunks), list(chunks.values()), None, **self._last_only)
            for row, chunk in chunks.items():
                self.lengths[row] += len(chunk)

    def truncate(self, row: int, length: int) -> None:
        """Forget everything of `row` past its first `length` tokens."""
        if length > self.lengths[row]:
            raise ValueError(f"row {row} holds {self.lengths[row]} tokens, cannot keep {length}")
        self.lengths[row] = length

    def keep(self, row: int, start: int, kept: Sequence[int]) -> None:
        """Of the tokens of `row` from position `start` on, keep those numbered in `kept`
        (increasing) and forget the others. Nothing is computed again."""
        self.cache.keep(row, start, kept)

    def _run(
        self,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None,
        **options: object,
    ) -> object:
        width = max(self._least_width, *map(len, tokens))
        window = self.cache.open_window(rows, width)
        if window.end > self.cache.positions:
            raise ValueError(f"{window.end} tokens do not fit in a slot of {self.cache.positions}")
        ids = torch.tensor([[*own, *[0] * (width - len(own))] for own in tokens])
        starts = torch.tensor(window.offsets)[:, None]
        if parents is None:
            depths = torch.arange(width)[None]
            within = None
        else:
            depths, within = _tree_layout(parents, width)
        positions = (starts + depths).to(self.device)
        return self.model(
            input_ids=ids.to(self.device),
            position_ids=positions.clamp(max=self._last_position),
            attention_mask=self._masks(starts.to(self.device), positions, within),
            past_key_values=self.cache,
            use_cache=True,
            **options,
        )

    def _masks(
        self, starts: Tensor, positions: Tensor, within: Tensor | None
    ) -> Tensor | dict[str, Tensor]:
        masks = {
            kind: self._mask(starts, positions, within, w) for kind, w in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(
        self, starts: Tensor, positions: Tensor, within: Tensor | None, window: int | None
    ) -> Tensor:
        """Additive mask (rows, 1, width, end): a query sees the cached prefix and, of the tokens
        fed with it, its predecessors (its ancestors in a tree), within the sliding window."""
        end = self.cache.window.end
        if window is None and positions.numel() == 1:
            return self._all_visible[..., :end]
        columns = self._columns[:end]
        if within is None:
            key_positions = columns.expand(len(positions), end)
            visible = columns <= positions[..., None]
        else:
            # Fed token j of a row sits in column starts + j and at position starts + depth(j).
            width = positions.shape[1]
            fed = (starts + self._columns[:width]).clamp(max=end - 1)
            key_positions = columns.expand(len(positions), end).scatter(1, fed, positions)
            visible = (columns < starts[..., None]).expand(-1, width, -1)
            index = fed[:, None].expand(-1, width, -1)
            visible = visible.scatter(2, index, within.to(visible.device))
        if window is not None:
            visible = visible & (positions[..., None] - key_positions[:, None] < window)
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~visible, self._blocked)[:, None]


def _tree_layout(parents: Sequence[Sequence[int]], width: int) -> tuple[Tensor, Tensor]:
    """Depths (rows, width) and ancestor-or-self matrices (rows, width, width) of padded trees."""
    depths = torch.zeros((len(parents), width), dtype=torch.long)
    within = torch.eye(width, dtype=torch.bool).repeat(len(parents), 1, 1)
    for row, own in enumerate(parents):
        for node, parent in enumerate(own):
            if parent >= 0:
                depths[row, node] = depths[row, parent] + 1
                within[row, node] |= within[row, parent]
    return depths, within
