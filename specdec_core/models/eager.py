"""Forwards of any decoder-only transformers model, run eagerly in this process."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from specdec_core.models.attention import attends_here, cache_dtype
from specdec_core.models.cache import PooledCache, open_cache
from specdec_core.models.features import LayerInputs
from specdec_core.models.local_runner import LocalRunner
from specdec_core.models.row_attention import (
    MaskedSpans,
    PackedSequence,
    RowMask,
    RowTokens,
    SeenPlaces,
    operator,
)
from specdec_core.models.runner import Batch, Output, PackedOutput, PaddedOutput
from specdec_core.models.supported import check_supported, context_length
from specdec_core.tokens.topology import Slices, Topologies

log = logging.getLogger(__name__)

# Rows are padded to the widest of the batch, so one that is nearly full writes beyond its end.
# Where this is too little, beside a piece of a prompt, they are run apart.
_PADDING = 160
_ALIKE = {torch.float32: 1e-3}  # how far logits may differ, as a share of their norm
_ALIKE_REDUCED = 0.1


class EagerRunner(LocalRunner):
    """A model and its slot cache. Logits are of the first `vocab_size` tokens; unset, of all.

    Rows are packed into one sequence where the model allows it (`packs`): before the first such
    forward its rows are run both ways, and a model that does not give the same logits is run with
    padded rows. With `compact` the cache keeps the model's own data type, and the project's
    operator attends to it, as always on a GPU; unset, on a CPU for a model in bfloat16, which
    halves the memory that is read. A `pooled` cache takes its memory in blocks, for `cache_tokens`
    tokens at first; unset, it does on a GPU where the operator attends. The inputs of the layers
    `features` are kept of every token. Of a model that several processes share, `agree` says to
    each whether all of them find the logits the same: they are run alike.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        max_length: int,
        vocab_size: int | None = None,
        packs: bool = True,
        compact: bool | None = None,
        pooled: bool | None = None,
        cache_tokens: int | None = None,
        features: Sequence[int] = (),
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        super().__init__()
        self.model, self._agree = model.eval(), agree
        config = model.config.get_text_config(decoder=True)
        check_supported(config, config.model_type)
        self.device = model.device
        self.packs = packs and attends_here(model)
        on_cpu = self.device.type == "cpu"
        if compact is None or not on_cpu:
            compact = not on_cpu or model.dtype == torch.bfloat16
        self.compact = compact and self.packs and operator.available(self.device)
        self.packs = self.packs and (on_cpu or self.compact)
        dtype = model.dtype if self.compact else cache_dtype(model)
        self.vocab_size = min(config.vocab_size, vocab_size or config.vocab_size)
        self.max_length = max_length
        limit = context_length(config)
        self.last_position = limit - 1 if limit else max_length + _PADDING
        kinds, arguments = get_layer_types_and_kwargs(config)
        pooled = self.compact and not on_cpu if pooled is None else pooled
        size = len(kinds), slots, max_length + _PADDING
        self._open = partial(open_cache, *size, self.device, dtype, tokens=cache_tokens)
        self.cache = self._open(pooled=pooled)
        positions = self.cache.positions
        windows = {k: a.get("sliding_window") for k, a in zip(kinds, arguments, strict=True)}
        # A model with layers of one kind takes the mask itself, a mixed one a mask for each kind.
        self.windows: dict[str, int | None] = {
            kind: window if window and window < positions else None
            for kind, window in windows.items()
        }
        self.topologies = Topologies(positions, dtype, self.device)
        # On a CPU, torch attends with one bfloat16 query several times slower than with two.
        reduced = on_cpu and dtype in (torch.bfloat16, torch.float16)
        self._least_width = 2 if reduced else 1
        self._all_visible = torch.zeros((1, 1, 1, positions), dtype=dtype, device=self.device)
        accepted = inspect.signature(model.forward).parameters
        self.keeps_logits = "logits_to_keep" in accepted
        self.compared = False  # packed rows with padded ones
        self.feature_layers = tuple(features)
        self.layer_inputs: LayerInputs | None = None
        if features:
            self.layer_inputs = LayerInputs(model, features)
            self._keep_features()
        self._hidden: Tensor | None = None
        self._watch: RemovableHandle | None = None

    def _keep_features(self) -> None:
        width = (
            len(self.feature_layers) * self.model.config.get_text_config(decoder=True).hidden_size
        )
        like = torch.empty(0, dtype=self.model.dtype, device=self.device)
        self.cache.keep_features(width, like)

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
        if self.packs and (len(batch.rows) > 1 or self.compact):
            told = self.compared or self._compare(batch)
            if self.packs and told:
                return self._forward_packed(batch)
        return self._forward_padded(batch)

    def prepare(self) -> None:
        """Make the cache's layers, and decide how rows are run."""
        rows = range(min(self.cache.slots, 2))
        some = [self.vocab_size * n // 5 for n in (1, 2, 3)]  # not the first: it may be padding
        batch = Batch(rows, [some[row:] for row in rows])
        with torch.inference_mode(False), torch.no_grad():  # torch.compile takes no other tensors
            if self.compact and not self.compared:
                self._compare(batch)
            self._forward(batch)
        for row in rows:
            self.truncate(row, 0)

    def _compare(self, batch: Batch) -> bool:
        """Decide how rows are run, by running those of a batch both ways. Leaves nothing behind, so
        that no forward depends on which one was the first. False where their logits are no numbers,
        which tell nothing."""
        told = self._run_both_ways(batch)
        if not self.packs and isinstance(self.cache, PooledCache) and not any(self.lengths):
            # Padded rows would be copied out of the pool's blocks.
            self.cache = self._open(pooled=False)
            if self.feature_layers:
                self._keep_features()
        return told

    def _run_both_ways(self, batch: Batch) -> bool:
        lengths = [self.cache.lengths[row] for row in batch.rows]
        last = Batch(batch.rows, batch.tokens, batch.parents, [1] * len(lengths))
        logits = []
        for run in (self._forward_padded, self._forward_packed):
            try:
                logits.append(run(last).logits.float())
            except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
                if run == self._forward_padded:
                    return True  # it has no room where packed rows may have some
                log.info("%s pads its rows: %s", self.model.config.model_type, error)
                self.packs = self._agree(False)
                return True
            finally:
                for row, length in zip(batch.rows, lengths, strict=True):
                    self.cache.lengths[row] = length
        padded, packed = logits
        self.packs, told = packed.shape == padded.shape, not padded.isnan().any()
        if self.packs and told:
            alike = _ALIKE.get(self.model.dtype, _ALIKE_REDUCED) * padded.norm()
            self.packs = bool((packed - padded).norm() <= alike)
        self.packs = self._agree(self.packs)
        self.compared = told
        return told

    def _forward_padded(self, batch: Batch) -> Output:
        rows, tokens = batch.rows, batch.tokens
        counts = [max(self._least_width, len(row)) for row in tokens]
        width = max(counts)
        if not self.cache.fits(rows, [width] * len(rows)) and self.cache.fits(rows, counts):
            return self._forward_apart(batch)
        window = self.cache.open_window(rows, width)
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens])
        slices = self.topologies.slices([len(row) for row in tokens], width, batch.parents)
        begin = [at - first for at, first in zip(window.offsets, slices.first, strict=True)]
        starts = torch.tensor(begin)[:, None]
        positions = (starts + slices.depths).to(self.device)
        # From here on logits are computed: where any row's are wanted, or of one place.
        wanted = zip(batch.tokens, batch.counts, strict=True)
        first = min((len(row) - count for row, count in wanted if count), default=width - 1)
        last_only: dict[str, Tensor | int] = {}
        if self.keeps_logits and first:
            last_only["logits_to_keep"] = width - first
        masks = {
            kind: self._mask(slices, starts.to(self.device), window.end, sliding)
            for kind, sliding in self.windows.items()
        }
        logits = self._run(ids.to(self.device), positions, masks, last_only)
        self.cache.append(rows, map(len, tokens))
        return PaddedOutput(batch, logits, self._hidden, first=first if last_only else 0)

    def _forward_apart(self, batch: Batch) -> Output:
        """Row after row: where one is too full for padding as wide as the widest."""
        trees = batch.parents or [None] * len(batch.rows)
        each = zip(batch.rows, batch.tokens, trees, batch.counts, strict=True)
        alone = [
            self._forward_padded(Batch([row], [tokens], [parents], [count]))
            for row, tokens, parents, count in each
        ]
        logits = torch.cat([output.logits for output in alone])
        hidden = [output.hidden for output in alone if output.hidden is not None]
        return PackedOutput(batch.counts, logits, torch.cat(hidden) if hidden else None)

    def _forward_packed(self, batch: Batch) -> Output:
        counts = [len(row) for row in batch.tokens]
        window = self.cache.open_packed(batch.rows, counts)
        packed = PackedSequence.of(batch, window.ends, self.topologies)
        wanted = packed.wanted
        masks = {kind: RowMask.of(self._plan(packed.rows, w)) for kind, w in self.windows.items()}
        ids, positions = torch.tensor([[packed.tokens], [packed.positions]], device=self.device)
        logits = self._run(ids, positions, masks, self._logits_of(wanted))[0]
        hidden = None if self._hidden is None else self._hidden[0]
        if not wanted:
            logits, hidden = logits[:0], None if hidden is None else hidden[:0]
        elif not self.keeps_logits:
            logits, hidden = logits[wanted], None if hidden is None else hidden[wanted]
        self.cache.append(batch.rows, counts)
        return PackedOutput(batch.counts, logits, hidden)

    @property
    def mixes(self) -> bool:  # type: ignore[override]
        return self.packs and self.cache.slots > 1

    def _plan(self, rows: Sequence[RowTokens], window: int | None) -> SeenPlaces | MaskedSpans:
        if self.compact:
            return SeenPlaces(rows, window, self.cache.table)
        return MaskedSpans(rows, window)

    def _logits_of(self, wanted: Sequence[int]) -> dict[str, Tensor | int]:
        """The option that makes the model leave out other logits; of none, it computes one."""
        kept = torch.tensor(wanted, device=self.device) if wanted else 1
        return {"logits_to_keep": kept} if self.keeps_logits else {}

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        masks: Mapping[str, Tensor],
        options: dict[str, Tensor | int],
    ) -> Tensor:
        """Logits of a forward of the model."""
        output = self.model(
            input_ids=ids,
            position_ids=positions.clamp(max=self.last_position),
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            past_key_values=self.cache,
            use_cache=True,
            **options,
        )
        if self.layer_inputs is not None and self.cache.features is not None:
            states = self.layer_inputs.take()[:, None]  # as a layer with one head
            self.cache.window.write(self.cache.features.tensor, states)
        logits: Tensor = output.logits[..., : self.vocab_size]
        return logits

    def _mask(self, slices: Slices, starts: Tensor, end: int, window: int | None) -> Tensor:
        """Additive mask (rows, 1, width, end): a query sees the cached text and, after it, its
        predecessors (its ancestors in a tree)."""
        if window is None and slices.single:
            return self._all_visible[..., :end]
        return slices.mask(starts, end, window)
