"""ModelRunner: forward a few tokens of a few slots, keep what was accepted.

The seam between the engine and whatever executes a model. This one runs any decoder-only
transformers model eagerly in this process.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import NamedTuple

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
        `parents`, row i's tokens form a tree: token j follows token `parents[i][j]`, or the text
        before the tree when that is -1, and sees only its ancestors. `parents[i]` may begin with
        tokens of the tree that earlier forwards have appended: a tree grows level by level.
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
            tree = None
        else:
            grown = [len(p) - len(own) for p, own in zip(parents, tokens, strict=True)]
            starts = starts - torch.tensor(grown)[:, None]
            tree = _tree_layout(parents, grown, width)
            depths = tree.fed_depths
        positions = (starts + depths).to(self.device)
        return self.model(
            input_ids=ids.to(self.device),
            position_ids=positions.clamp(max=self._last_position),
            attention_mask=self._masks(starts.to(self.device), positions, tree),
            past_key_values=self.cache,
            use_cache=True,
            **options,
        )

    def _masks(
        self, starts: Tensor, positions: Tensor, tree: _Layout | None
    ) -> Tensor | dict[str, Tensor]:
        masks = {kind: self._mask(starts, positions, tree, w) for kind, w in self._windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(
        self, starts: Tensor, positions: Tensor, tree: _Layout | None, window: int | None
    ) -> Tensor:
        """Additive mask (rows, 1, width, end): a query sees the cached text and, behind it, its
        predecessors (its ancestors in a tree), within the sliding window."""
        end = self.cache.window.end
        if window is None and positions.numel() == 1 and tree is None:
            return self._all_visible[..., :end]
        if tree is None:
            columns = self._columns[:end]
            key_positions = columns.expand(len(positions), end)
            visible = columns <= positions[..., None]
        else:
            # Token j of a row's tree sits in column starts + j and at position starts + depth(j).
            size = tree.within.shape[2]
            columns = torch.arange(int(starts.max()) + size, device=self.device)
            placed = starts + columns[:size]
            key_positions = columns.repeat(len(positions), 1)
            key_positions = key_positions.scatter(1, placed, starts + tree.depths.to(self.device))
            visible = (columns < starts[..., None]).repeat(1, positions.shape[1], 1)
            index = placed[:, None].expand(-1, positions.shape[1], -1)
            visible = visible.scatter(2, index, tree.within.to(self.device))
            key_positions, visible = key_positions[:, :end], visible[..., :end]
        if window is not None:
            visible = visible & (positions[..., None] - key_positions[:, None] < window)
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~visible, self._blocked)[:, None]


class _Layout(NamedTuple):
    """How padded trees lie in the cache."""

    depths: Tensor  # (rows, size) of all tokens of the trees
    fed_depths: Tensor  # (rows, width) of those fed now
    within: Tensor  # (rows, width, size): which of the tree a fed token sees, itself included


def _tree_layout(parents: Sequence[Sequence[int]], grown: Sequence[int], width: int) -> _Layout:
    """Of row i's tree the first `grown[i]` tokens are in the cache already."""
    size = max(grown) + width
    depths = torch.zeros((len(parents), size), dtype=torch.long)
    within = torch.eye(size, dtype=torch.bool).repeat(len(parents), 1, 1)
    for row, own in enumerate(parents):
        for node, parent in enumerate(own):
            if parent >= 0:
                depths[row, node] = depths[row, parent] + 1
                within[row, node] |= within[row, parent]
    fed = torch.tensor(grown)[:, None] + torch.arange(width)
    return _Layout(
        depths,
        depths.gather(1, fed),
        within.gather(1, fed[..., None].expand(-1, -1, size)),
    )
