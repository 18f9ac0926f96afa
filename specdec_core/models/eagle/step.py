"""One forward of a head over packed tokens of several rows, to run eagerly or compiled."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers.cache_utils import Cache

from specdec_core.models.cache.tensor_layer import TensorLayer
from specdec_core.models.confidence import most_likely
from specdec_core.models.eagle import AnyHead
from specdec_core.models.row_attention.plans import MaskedSpans, OperatorPlan, RowMask

_MOST = 1 << 20


class EagleStep(nn.Module):
    """`head` behind the interface of a graph."""

    def __init__(self, head: AnyHead) -> None:
        super().__init__()
        self.head = head
        self._mask = RowMask.empty()  # see PackedStep

    def forward(
        self,
        feed: Tensor,
        wanted: Tensor,
        features: Tensor,
        known: Tensor,
        tokens: Tensor,
        nodes: Tensor,
        keys: Tensor,
        values: Tensor,
        states: Tensor,
        blocks: Tensor | None = None,
        plan: MaskedSpans | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Append n tokens to the rows of a cache, in place.

        Args:
            feed: (5, n) integers: the tokens, the rows and places in the stores that they are
                written to, their positions, and the places of the tokens before them, -1 where
                none was read.
            wanted: (m,) the numbers of the tokens to return logits of.
            features: the target's, of the tokens before k of them (k, layers · width), which are
                read in the place of states; k may be 0.
            known: (k,) integers: which of the n they are.
            tokens: what each token sees, (n, 5); see
                :func:`specdec_core.models.row_attention.operator.attend`.
            nodes: the positions that these refer to.
            keys: (slots, heads, places, head size).
            values: alike.
            states: what the head reads before a token that follows another (slots, 1, places,
                width); changed for the new tokens.
            blocks: of a pooled cache, the table of blocks.
            plan: attends in place of the operator, without `tokens` and `nodes`.

        Returns:
            Logits of the target's vocabulary (m, vocabulary), the most likely tokens (m,), the
            inputs of the output layer (m, width), and the most likely tokens' probabilities (m,).
        """
        ids, rows, places, positions, before = feed.unbind()
        self._mask.plan = plan or OperatorPlan(tokens, nodes, blocks)
        own = states[rows, :, before.clamp(min=0)].flatten(1)
        read = torch.where((before >= 0)[:, None], own, 0)
        read = read.index_put((known,), self.head.fused(features))
        after = self.head(
            ids[None],
            read[None],
            positions[None],
            attention_mask=self._mask,
            past_key_values=Cache(layers=[TensorLayer(keys, values, rows, places)]),
        )[0]
        # Of a view, a graph would write back the whole store.
        states[rows, :, places] = after[:, None]
        normed = self.head.normed(after[wanted])
        logits = self.head.logits(after[wanted])
        chosen, confidence = most_likely(logits)
        return self.head.spread(logits), self.head.proposable[chosen], normed, confidence


def example(
    keys: Tensor, values: Tensor, states: Tensor, features: int
) -> tuple[tuple[Tensor, ...], tuple[dict[int, Dim], ...]]:
    """Example inputs for stores like these and `features` numbers of a token, with several of
    everything, and the dimensions that vary, as torch.export has them."""
    n, m, f, k = (Dim(name, min=2, max=_MOST) for name in ("tokens", "wanted", "known", "nodes"))
    slots, positions = (Dim(name, min=2, max=_MOST) for name in ("slots", "positions"))
    stores = keys, values, states
    inputs = (
        torch.arange(3, device=keys.device) + torch.zeros((5, 1), dtype=torch.long),
        torch.tensor([0, 1]),
        states.new_zeros((2, features)),
        torch.tensor([0, 1]),
        torch.tensor([[0, 0, 1, 0, 0]] * 3, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        *(store.new_zeros((2, store.shape[1], 8, store.shape[3])) for store in stores),
    )
    cached: dict[int, Dim] = {0: slots, 2: positions}
    return inputs, ({1: n}, {0: m}, {0: f}, {0: f}, {0: n}, {0: k}, cached, cached, cached)
