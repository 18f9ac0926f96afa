"""Forwards of any decoder-only transformers model, run eagerly in this process."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from specdec_core.models.attention import attends_here, cache_dtype
from specdec_core.models.cache import PooledCache, SlotCache
from specdec_core.models.features import LayerInputs
from specdec_core.models.local_runner import LocalRunner
from specdec_core.models.row_attention import operator
from specdec_core.models.row_attention.plans import (
    MaskedSpans,
    OperatorPlan,
    RowMask,
    RowTokens,
    SeenPlaces,
)
from specdec_core.models.row_attention.sequence import PackedSequence
from specdec_core.models.runner import Batch, Output
from specdec_core.models.supported import check_supported, context_length
from specdec_core.tokens.topology import Topologies

log = logging.getLogger(__name__)

TREE_ROOM = 160  # positions after a row's tokens, for a last draft tree
# The most by which logits may differ between packed rows and rows alone, relative to their norm.
_ALIKE, _ALIKE_REDUCED = 1e-3, 0.1


class EagerRunner(LocalRunner):
    """A model and its slot cache. Logits are of the first `vocab_size` tokens; unset, of all.

    The rows of a batch are packed into one sequence. A model that does not use torch's attention,
    or gives other logits for packed rows in a trial at the start, has a forward for each row. With
    `packs` false any model has. Of a model that several processes share, `agree` says in each of
    them whether something is true in all: they are run in the same way.

    With `compact` the cache keeps the model's own data type, and the project's operator attends to
    it. That is always so on a GPU; unset, it is on a CPU for a model in bfloat16, which halves the
    memory that is read. A `pooled` cache takes its memory in blocks, for `cache_tokens` tokens at
    first; unset, it does on a GPU where the operator attends. The inputs of the layers `features`
    are kept of every token.
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
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.device, self.shared = model.eval(), model.device, agree is not None
        self.agree: Callable[[bool], bool] = agree or bool
        config = model.config.get_text_config(decoder=True)
        check_supported(config, config.model_type)
        packs = packs and attends_here(model)
        on_cpu = self.device.type == "cpu"
        if compact is None or not on_cpu:
            compact = not on_cpu or model.dtype == torch.bfloat16
        self.compact = compact and packs and operator.available(self.device)
        dtype = model.dtype if self.compact else cache_dtype(model)
        self.vocab_size = min(config.vocab_size, vocab_size or config.vocab_size)
        self.max_length, positions = max_length, max_length + TREE_ROOM
        limit = context_length(config)
        self.last_position = limit - 1 if limit else positions
        kinds, arguments = get_layer_types_and_kwargs(config)
        windows = {k: a.get("sliding_window") for k, a in zip(kinds, arguments, strict=True)}
        # A model with layers of one kind takes the mask itself, a mixed one a mask for each kind.
        self.windows: dict[str, int | None] = {
            kind: window if window and window < positions else None
            for kind, window in windows.items()
        }
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._hidden: Tensor | None = None
        self._watch: RemovableHandle | None = None
        self.feature_layers = tuple(features)
        self.layer_inputs = LayerInputs(model, features) if features else None
        self.cache = SlotCache(len(kinds), 2, TREE_ROOM, dtype)  # of the trial, both
        self.topologies = Topologies(dtype, self.device)
        self.packs = packs and (on_cpu or self.compact)
        if self.packs:
            self.packs = self.agree(self._packs_alike())
        self.compact = self.compact and self.packs
        dtype = model.dtype if self.compact else cache_dtype(model)
        pooled = self.compact and not on_cpu if pooled is None else pooled and self.packs
        self.topologies = Topologies(dtype, self.device)
        size, pool = (len(kinds), slots, positions), (self.device, dtype, cache_tokens)
        self.cache = PooledCache(*size, *pool) if pooled else SlotCache(*size, dtype)
        if features:
            width = len(self.feature_layers) * config.hidden_size
            like = torch.empty(0, dtype=model.dtype, device=self.device)
            self.cache.keep_features(width, like)

    @torch.inference_mode()
    def _packs_alike(self) -> bool:
        """Whether two rows, a chain and a tree, give the same logits packed as they do alone."""
        tokens = [self.vocab_size * n // 5 for n in (1, 2, 3)]  # not the first: it may be padding
        batch = Batch([0, 1], [tokens[:2], tokens], [None, [-1, 0, 0]])
        alone = self._row_by_row(batch).logits.float()
        for row in batch.rows:
            self.truncate(row, 0)
        try:
            packed = self._run(batch).logits.float()
        except Exception as error:  # whatever a model does that takes another mask or batch
            log.info("%s runs row by row: %s", self.model.config.model_type, error)
            return False
        alike = _ALIKE if self.model.dtype == torch.float32 else _ALIKE_REDUCED
        return packed.shape == alone.shape and bool((packed - alone).norm() <= alike * alone.norm())

    @property
    def mixes(self) -> bool:  # type: ignore[override]
        return self.packs and self.cache.slots > 1

    def expect(self, parents: Sequence[int]) -> None:
        self.topologies.expect(parents)

    def watch_hidden(self, wanted: bool) -> None:
        if wanted and self._watch is None:
            output, runner = self.model.get_output_embeddings(), weakref.ref(self)

            def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                if (own := runner()) is not None:
                    own._hidden = inputs[0]

            self._watch = output.register_forward_pre_hook(keep)
            weakref.finalize(self, self._watch.remove)  # the model outlives its runners
        elif not wanted and self._watch is not None:
            self._watch.remove()
            self._watch = self._hidden = None

    def _forward(self, batch: Batch) -> Output:
        return self._run(batch) if self.packs else self._row_by_row(batch)

    def _row_by_row(self, batch: Batch) -> Output:
        trees = batch.parents or [None] * len(batch.rows)
        before = [self.cache.lengths[row] for row in batch.rows]
        outputs = []
        try:
            for each in zip(batch.rows, batch.tokens, trees, batch.counts, strict=True):
                row, tokens, parents, count = each
                one = Batch([row], [tokens], [parents], [count])
                outputs.append(self._run(one, packed=False))
        except Exception:
            for row, length in zip(batch.rows, before, strict=True):
                self.cache.truncate(row, length)
            raise
        logits = torch.cat([output.logits for output in outputs])
        hidden = [output.hidden for output in outputs if output.hidden is not None]
        return Output(batch.counts, logits, torch.cat(hidden) if hidden else None)

    def _run(self, batch: Batch, packed: bool = True) -> Output:
        """A forward of the model: of packed rows, or of a single row with a plain mask."""
        counts = [len(row) for row in batch.tokens]
        window = self.cache.open_window(batch.rows, counts, own_row_only=not packed)
        sequence = PackedSequence.of(batch, window.ends, self.topologies)
        mask_of = self._packed_mask if packed else self._plain_mask
        masks = {kind: mask_of(sequence.rows, width) for kind, width in self.windows.items()}
        ids, positions = torch.tensor([[sequence.tokens], [sequence.positions]], device=self.device)
        wanted = sequence.wanted
        options: dict[str, Any] = {}
        if self.keeps_logits:  # the model leaves out other logits; of none, it computes one
            options["logits_to_keep"] = torch.tensor(wanted, device=self.device) if wanted else 1
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
            window.write(self.cache.features.tensor, states)
        logits: Tensor = output.logits[0, :, : self.vocab_size]
        hidden = None if self._hidden is None else self._hidden[0]
        if not wanted:
            logits, hidden = logits[:0], None if hidden is None else hidden[:0]
        elif not self.keeps_logits:
            logits, hidden = logits[wanted], None if hidden is None else hidden[wanted]
        self.cache.append(batch.rows, counts)
        return Output(batch.counts, logits, hidden)

    def _packed_mask(self, rows: Sequence[RowTokens], window: int | None) -> Tensor:
        if not self.compact:
            return RowMask.of(MaskedSpans(rows, window))
        tables = SeenPlaces(rows, window).tables(self.device)
        return RowMask.of(OperatorPlan(*tables, self.cache.table))

    def _plain_mask(self, rows: Sequence[RowTokens], window: int | None) -> Tensor:
        """The additive mask (1, 1, tokens, positions) of a single row."""
        parts = [own.mask(window) for own in rows]
        end, blocked = rows[-1].end, torch.finfo(parts[0].dtype).min
        padded = [
            nn.functional.pad(part, (0, end - part.shape[1]), value=blocked) for part in parts
        ]
        return torch.cat(padded)[None, None]
