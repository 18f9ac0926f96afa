"""One forward of a head over packed tokens of several rows: run as it is, or compiled."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers.cache_utils import Cache

from specdec_core.models.cache.tensor_layer import TensorLayer
from specdec_core.models.confidence import most_likely
from specdec_core.models.eagle.any_head import AnyHead
from specdec_core.models.row_attention import RowMask, RowPlan, SeenTensors

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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """:meth:`run` with the plan as the operator's tables, (n, 5) and (nodes,)."""
        plan = SeenTensors(tokens, nodes)
        return self.run(feed, wanted, features, known, plan, keys, values, states)

    def run(
        self,
        feed: Tensor,
        wanted: Tensor,
        features: Tensor,
        known: Tensor,
        plan: RowPlan,
        keys: Tensor,
        values: Tensor,
        states: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Append n tokens to the rows of a cache, in place.

        Args:
            feed: (5, n) integers: the tokens, their rows, the places in the cache that they are
                written to, their positions, and the numbers in their rows' texts of the tokens
                before them.
            wanted: (m,) the numbers of the tokens whose logits are.
            features: the target's, of k tokens before (k, layers · width); k may be 0, when the
                states are the head's own.
            known: (k, 2) integers: the rows of those tokens and their numbers in them.
            plan: what each token sees.
            keys: (slots, heads, places, head size).
            values: alike.
            states: what the head reads before the next token, after each token of each row
                (slots, 1 + places, width); changed for the new tokens.

        Returns:
            Logits of the target's vocabulary (m, vocabulary), the most likely tokens (m,), what the
            output layer read (m, width), and the probabilities of those tokens (m,).
        """
        ids, rows, places, positions, before = feed.unbind()
        self._mask.plan = plan
        states[known[:, 0], known[:, 1]] = self.head.fused(features)
        after = self.head(
            ids[None],
            states[rows, before][None],
            positions[None],
            attention_mask=self._mask,
            past_key_values=Cache(layers=[TensorLayer(keys, values, rows, places)]),
        )[0]
        states[rows, places + 1] = after
        read = self.head.normed(after[wanted])
        logits = self.head.logits(after[wanted])
        chosen, confidence = most_likely(logits)
        return self.head.spread(logits), self.head.proposable[chosen], read, confidence


def example(
    keys: Tensor, values: Tensor, states: Tensor, features: int
) -> tuple[tuple[Tensor, ...], tuple[dict[int, Dim], ...]]:
    """Inputs with several of everything for stores like these and so many `features` of a token,
    and, as torch.export has them, the dimensions that vary."""
    n, m, f, k = (Dim(name, min=2, max=_MOST) for name in ("tokens", "wanted", "known", "nodes"))
    slots, positions, texts = (
        Dim(name, min=2, max=_MOST) for name in ("slots", "positions", "texts")
    )
    inputs = (
        torch.arange(3, device=keys.device) + torch.zeros((5, 1), dtype=torch.long),
        torch.tensor([0, 1]),
        states.new_zeros((2, features)),
        torch.tensor([[0, 0], [0, 1]]),
        torch.tensor([[0, 0, 1, 0, 0]] * 3, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        *(store.new_zeros((2, store.shape[1], 8, store.shape[3])) for store in (keys, values)),
        states.new_zeros((2, 9, states.shape[2])),
    )
    cached: dict[int, Dim] = {0: slots, 2: positions}
    return inputs, (
        {1: n},
        {0: m},
        {0: f},
        {0: f},
        {0: n},
        {0: k},
        cached,
        cached,
        {0: slots, 1: texts},
    )
