"""One forward pass of packed rows as a function of tensors alone: what gets compiled."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from specdec_core.models.row_attention import RowMask
from specdec_core.models.row_attention.plans import attend_to


class PackedStep(nn.Module):
    """`model` behind the interface of a graph.

    `kinds` are the model's kinds of layers, `last_position` is the last one that it can tell apart,
    `vocab_size` says how many tokens to give logits of, and `keeps_logits` whether the model can
    leave out the others' logits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kinds: Sequence[str],
        last_position: int,
        vocab_size: int,
        keeps_logits: bool,
    ) -> None:
        super().__init__()
        self.model, self.last_position = model, last_position
        self.vocab_size, self.keeps_logits = vocab_size, keeps_logits
        # Models are traced with tensors that only have shapes; a mask cannot be made of those.
        self._masks = {kind: RowMask.empty() for kind in kinds}
        # What the output layer reads; one, so that eager forwards of the model leave no more.
        self._read: deque[Tensor] = deque(maxlen=1)
        output = model.get_output_embeddings()
        output.register_forward_pre_hook(lambda _, inputs: self._read.append(inputs[0]))

    def forward(
        self,
        feed: Tensor,
        wanted: Tensor,
        tokens: Sequence[Tensor],
        nodes: Sequence[Tensor],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append n tokens to the rows of a cache, in place.

        Args:
            feed: (4, n) integers: the tokens, their rows, the positions in the cache that they are
                written to, and those in their texts.
            wanted: (m,) the numbers of the tokens whose logits are.
            tokens: for each kind of layer, what each token sees, (n, 5); see
                :func:`specdec_core.models.row_attention.operator.attend`.
            nodes: alike, the positions that these refer to.
            keys: of each layer (slots, heads, positions, head size).
            values: alike.

        Returns:
            Logits (m, vocabulary), the most likely tokens (m,), and what the output layer read
            (m, dimension).
        """
        ids, rows, places, positions = feed.unbind()
        for mask, own_tokens, own_nodes in zip(self._masks.values(), tokens, nodes, strict=True):
            mask.plan = _Seen(own_tokens, own_nodes)
        cache = Cache(layers=[_Layer(*own, rows, places) for own in zip(keys, values, strict=True)])
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
        hidden, logits = self._read.pop()[0], output.logits[0, :, : self.vocab_size]
        if not self.keeps_logits:
            hidden, logits = hidden[wanted], logits[wanted]
        return logits, logits.max(dim=-1).indices, hidden


class _Seen:
    """A plan whose tensors are a graph's inputs."""

    def __init__(self, tokens: Tensor, nodes: Tensor) -> None:
        self.tokens, self.nodes = tokens, nodes

    def attend(
        self, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        return attend_to(self.tokens, self.nodes, query, keys, values, options.get("scaling"))


class _Layer(CacheLayerMixin):
    """A layer of the slot cache whose places to write to are tensors."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, places: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own
        self.keys, self.values, self.is_initialized = keys, values, True
        self._at = rows, slice(None), places

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the cache is there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys[self._at] = key_states[0].transpose(0, 1).to(self.keys.dtype)
        self.values[self._at] = value_states[0].transpose(0, 1).to(self.values.dtype)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]
