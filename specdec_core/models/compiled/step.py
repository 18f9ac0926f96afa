"""One forward pass of packed rows as a function of tensors alone: what gets compiled."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers.cache_utils import Cache

from specdec_core.models.cache.tensor_layer import TensorLayer
from specdec_core.models.confidence import most_likely
from specdec_core.models.eager import EagerRunner
from specdec_core.models.row_attention.plans import OperatorPlan, RowMask

_MOST = 1 << 20  # of any dimension that varies
_MOST_PLACES = (1 << 31) - 1  # of a pool, which counts all rows together; they come as int32


class PackedStep(nn.Module):
    """The model of an `eager` runner behind the interface of a graph. A `draft` also returns how
    sure it is."""

    def __init__(self, eager: EagerRunner, draft: bool = False) -> None:
        super().__init__()
        model = self.model = eager.model
        self.held = eager.cache.held_numbers  # of the model's layers, those in this process
        self.last_position, self.vocab_size = eager.last_position, eager.vocab_size
        self.keeps_logits, self._layer_inputs = eager.keeps_logits, eager.layer_inputs
        self.draft = draft
        # A mask cannot be made while a model is traced, with tensors that only have shapes.
        self._masks = {kind: RowMask.empty() for kind in eager.windows}
        # The last input of the output layer; at most one, because eager forwards add to it, too.
        self._read = read = deque[Tensor](maxlen=1)
        output = model.get_output_embeddings()
        hook = output.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
        weakref.finalize(self, hook.remove)  # the model outlives its steps

    def forward(
        self,
        feed: Tensor,
        wanted: Tensor,
        tokens: Sequence[Tensor],
        nodes: Sequence[Tensor],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        features: Sequence[Tensor],
        blocks: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Append n tokens to the rows of a cache, in place.

        Args:
            feed: (4, n) integers: the tokens, their rows, the positions in the cache that they are
                written to, and those in their sequences.
            wanted: (m,) the numbers of the tokens to return logits of.
            tokens: for each kind of layer, what each token sees, (n, 5); see
                :func:`specdec_core.models.row_attention.operator.attend`.
            nodes: for each kind of layer, the positions that these refer to.
            keys: of each held layer (slots, heads, positions, head size).
            values: the same.
            features: the store of the layers' inputs (slots, 1, positions, size), where they are
                kept.
            blocks: of a pooled cache, the table of blocks (slots, blocks of a slot). All stores
                are (1, …) then, and rows in `feed` are 0.

        Returns:
            Logits (m, vocabulary), the most likely tokens (m,), the inputs of the output layer
            (m, dimension) and, for a draft, the probabilities of the most likely tokens (m,).
        """
        ids, rows, places, positions = feed.unbind()
        for mask, own_tokens, own_nodes in zip(self._masks.values(), tokens, nodes, strict=True):
            mask.plan = OperatorPlan(own_tokens, own_nodes, blocks)
        layers = [TensorLayer(*own, rows, places) for own in zip(keys, values, strict=True)]
        # In the place of a layer of another process is one of this process, which is not written.
        numbers = range(self.held[-1] + 1)
        own = dict(zip(self.held, layers, strict=True))
        cache = Cache(layers=[own.get(number, layers[0]) for number in numbers])
        self._read.clear()
        masks = self._masks
        output = self.model(
            input_ids=ids[None],
            position_ids=positions[None].clamp(max=self.last_position),
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            past_key_values=cache,
            use_cache=True,
            **({"logits_to_keep": wanted} if self.keeps_logits else {}),
        )
        for store in features:
            assert self._layer_inputs is not None
            # With a number in place of the slice, compilers would copy the whole store.
            store[rows, :, places] = self._layer_inputs.take()[0][:, None].to(store.dtype)
        hidden, logits = self._read.pop()[0], output.logits[0, :, : self.vocab_size]
        if not self.keeps_logits:
            hidden, logits = hidden[wanted], logits[wanted]
        if not self.draft:
            return logits, logits.max(dim=-1).indices, hidden
        chosen, confidence = most_likely(logits)
        return logits, chosen, hidden, confidence


def example(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    features: Sequence[Tensor],
    kinds: int,
    blocks: Tensor | None = None,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Example inputs of a step, with several of everything, and the dimensions that vary, as
    torch.export has them: all except the cache's heads. The model has `kinds` kinds of layers and
    stores like these, in a pool where it has `blocks`."""
    device, rows = keys[0].device, 2 if blocks is None else 1
    n, m, k = (Dim(name, min=2, max=_MOST) for name in ("tokens", "wanted", "nodes"))
    slots = Dim("slots", min=2, max=_MOST)
    positions = Dim("positions", min=2, max=_MOST if blocks is None else _MOST_PLACES)
    sees = torch.tensor([[0, 0, 1, 0, 0]] * 3, dtype=torch.int32, device=device)
    # No tensor twice: a graph would take two inputs for one.
    inputs = (
        torch.arange(3, device=device) + torch.zeros((4, 1), dtype=torch.long, device=device),
        torch.tensor([0, 1], device=device),
        [sees.clone() for _ in range(kinds)],
        [torch.zeros(2, dtype=torch.int32, device=device) for _ in range(kinds)],
        *(
            [store.new_zeros((rows, store.shape[1], 8, store.shape[3])) for store in stores]
            for stores in (keys, values, features)
        ),
    )
    sizes = [{1: n}, {0: m}, [{0: n}] * kinds, [{0: k}] * kinds]
    varies = {0: slots, 2: positions} if blocks is None else {2: positions}
    sizes += [[varies] * len(stores) for stores in (keys, values, features)]
    if blocks is None:
        return inputs, tuple(sizes)
    count = Dim("blocks", min=2, max=_MOST)
    return (*inputs, blocks.new_zeros((2, 2))), (*sizes, {0: slots, 1: count})
