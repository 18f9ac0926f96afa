"""ModelRunner: forward a few tokens of a few slots, keep what was accepted.

The seam between the engine and whatever executes a model. This one runs any decoder-only
transformers model eagerly in this process.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from specdec_core.base.errors import UserError
from specdec_core.models.attention import cache_dtype
from specdec_core.models.cache import SlotCache
from specdec_core.tokens.topology import Slices, Topologies

# Rows of a batch are padded to the widest; a row close to its end then writes beyond it.
_PADDING = 160
PREFILL_CHUNK = 512
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


def check_supported(config: PreTrainedConfig, name: str) -> None:
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


def context_length(config: PreTrainedConfig) -> int | None:
    """Positions the model can tell apart, where its configuration says."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


class ModelRunner:
    """One model and its slot cache.

    `lengths[row]` is the number of cached tokens of a row; `max_length` how many a row can hold.
    Logits are of the first `vocab_size` tokens: a draft may know more than its target.
    """

    def __init__(
        self, model: PreTrainedModel, slots: int, max_length: int, vocab_size: int | None = None
    ) -> None:
        self.model = model.eval()
        config = model.config.get_text_config(decoder=True)
        check_supported(config, config.model_type)
        self.device, self.dtype = model.device, model.dtype
        self.vocab_size: int = min(config.vocab_size, vocab_size or config.vocab_size)
        self.max_length = max_length
        limit = context_length(config)
        self._last_position = limit - 1 if limit else max_length + _PADDING
        kinds, arguments = get_layer_types_and_kwargs(config)
        dtype = cache_dtype(model)
        self.cache = SlotCache(len(kinds), slots, max_length + _PADDING, dtype)
        positions = self.cache.positions
        windows = {k: a.get("sliding_window") for k, a in zip(kinds, arguments, strict=True)}
        # A model with layers of one kind takes the mask itself, a mixed one a mask for each kind.
        self._windows: dict[str, int | None] = {
            kind: window if window and window < positions else None
            for kind, window in windows.items()
        }
        self._topologies = Topologies(positions, dtype, self.device)
        # On a CPU, torch attends with one bfloat16 query several times slower than with two.
        reduced = self.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)
        self._least_width = 2 if reduced else 1
        self._all_visible = torch.zeros((1, 1, 1, positions), dtype=dtype, device=self.device)
        accepted = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._prefill_chunk = PREFILL_CHUNK
        self.hidden: Tensor | None = None
        self._logits: Tensor  # of the last forward
        self.seconds = 0.0  # spent in forwards so far; on a GPU, in starting them
        self.lazy = False  # a draft that reads a text only when asked what follows it
        self._watch: RemovableHandle | None = None

    def widen(self, width: int) -> None:
        """Pad forwards to so many tokens a row at least. Where forwards of one token and of several
        take turns, this is worth it if graphs of their own run them: each has its own copy of the
        weights, and the processor's cache holds one sooner than both."""

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

    def expect(self, parents: Sequence[int]) -> None:
        """Make the mask of a tree, numbered level by level, that forwards will feed whole, cut
        behind a level or a level at a time. Without this it is made when the tree is first met."""
        self._topologies.expect(parents)

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
        start = perf_counter()
        logits = self._run(rows, tokens, parents)
        for row, own in zip(rows, tokens, strict=True):
            self.lengths[row] += len(own)
        fed = max(map(len, tokens))
        if logits.shape[1] != fed or logits.shape[2] != self.vocab_size:
            logits = logits[:, :fed, : self.vocab_size]
        self._logits = logits
        self.seconds += perf_counter() - start
        return self._logits

    @property
    def chosen(self) -> Tensor:
        """The most likely token (rows, width) at every place of the last forward."""
        # Not argmax: on a CPU in bfloat16 it takes five times as long.
        return self._logits.max(dim=-1).indices

    def choices(self) -> list[list[int]]:
        """The same on the host. Waits for the device."""
        return list(self.chosen.tolist())

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Append `tokens[i]` to row `rows[i]` without computing logits, a chunk at a time."""
        began = perf_counter()
        for start in range(0, max(map(len, tokens), default=0), self._prefill_chunk):
            chunks = {
                row: own[start : start + self._prefill_chunk]
                for row, own in zip(rows, tokens, strict=True)
                if len(own) > start
            }
            self._run(list(chunks), list(chunks.values()), logits=False)
            for row, chunk in chunks.items():
                self.lengths[row] += len(chunk)
        self.seconds += perf_counter() - began

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
        parents: Sequence[Sequence[int]] | None = None,
        logits: bool = True,
    ) -> Tensor:
        """Write the tokens to the cache and return the logits (rows, width or more, vocabulary or
        more); any of them where `logits` are not asked for."""
        width = max(self._least_width, *map(len, tokens))
        window = self.cache.open_window(rows, width)
        if window.end > self.cache.positions:
            raise ValueError(f"{window.end} tokens do not fit in a slot of {self.cache.positions}")
        ids = torch.tensor([[*own, *[0] * (width - len(own))] for own in tokens])
        slices = self._topologies.slices([len(own) for own in tokens], width, parents)
        begin = [at - first for at, first in zip(window.offsets, slices.first, strict=True)]
        starts = torch.tensor(begin)[:, None]
        positions = (starts + slices.depths).to(self.device)
        found: Tensor = self.model(
            input_ids=ids.to(self.device),
            position_ids=positions.clamp(max=self._last_position),
            attention_mask=self._masks(slices, starts.to(self.device)),
            past_key_values=self.cache,
            use_cache=True,
            **({} if logits else self._last_only),
        ).logits
        return found

    def _masks(self, slices: Slices, starts: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive masks (rows, 1, width, end), by kind of layer where there are several: a query
        sees the cached text and, behind it, its predecessors (its ancestors in a tree)."""
        masks = {kind: self._mask(slices, starts, w) for kind, w in self._windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, slices: Slices, starts: Tensor, window: int | None) -> Tensor:
        end = self.cache.window.end
        if window is None and slices.single:
            return self._all_visible[..., :end]
        return slices.mask(starts, end, window)
