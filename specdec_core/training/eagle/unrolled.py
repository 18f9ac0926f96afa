"""The training-time test of EAGLE-3 (§3.2): a head's own drafting over a text, all starts at once.

A chain starts at a token x_t. Step 0 reads x_t and g_{t-1}, step k reads x_{t+k} and the state of
step k - 1, and predicts the token after. As in drafting, step k attends to what step 0 read up to
x_t, and to steps 1 to k of the same chain. All chains share the keys of step 0, and have one key
for each further step: scores (n, n) and (n, k), instead of a mask over n · (k + 1) keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import rotate_half

from specdec_core.models.eagle import EagleHead
from specdec_core.training.recorded.features import TextBatch
from specdec_core.training.recorded.loss import rounded


@dataclass(frozen=True)
class UnrolledStep:
    """A step of the chains that reach it.

    Attributes:
        states: the head's states (rows, width).
        texts: the text of each chain (rows,).
        positions: the answer's token that was read last (rows,); the next one is predicted.
        starts: the answer's token that the chain starts at (rows,).
    """

    states: Tensor
    texts: Tensor
    positions: Tensor
    starts: Tensor


def unroll(head: EagleHead, batch: TextBatch, steps: int, share: float = 1.0) -> list[UnrolledStep]:
    """The head's steps from every token of the answers with a known next token.

    A random `share` of the chains of each step continues. The loss over these is, in expectation,
    the loss over all chains with weight share^k at step k, and costs as much less.
    """
    layer = _UnrolledLayer(head, batch)
    device = batch.tokens.device
    chains = torch.arange(batch.chains, device=device).expand(len(batch.tokens), -1)
    going = chains < batch.lengths[:, None]
    state = layer.fused_before(chains)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    done: list[UnrolledStep] = []
    for step in range(steps):
        if step:
            going &= chains + step < batch.lengths[:, None]
            if share < 1:
                going &= torch.rand(going.shape, device=device) < share
            kept = _first(going)
            going, chains, state = going.gather(1, kept), chains.gather(1, kept), _at(state, kept)
            keys, values = ([_at(own, kept) for own in both] for both in (keys, values))
        if not going.any():
            break
        state = layer(chains, step, state, keys, values)
        texts, columns = going.nonzero(as_tuple=True)
        starts = chains[texts, columns]
        done.append(UnrolledStep(state[texts, columns], texts, starts + step, starts))
    return done


class _UnrolledLayer:
    """The head's layer over a batch, with the keys and values of step 0."""

    def __init__(self, head: EagleHead, batch: TextBatch) -> None:
        assert head.embed_tokens is not None
        self.head, self.batch = head, batch
        self.embed: nn.Module = head.embed_tokens
        self.layer: Any = head.layers[0]
        self.attention: Any = self.layer.self_attn
        self.fused = head.fused(batch.features)
        tokens = batch.tokens[:, 1:]
        places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device).expand_as(tokens)
        both, _ = self._read(tokens, self.fused)
        self.keys, self.values = self._keys_and_values(both, places)

    def fused_before(self, chains: Tensor) -> Tensor:
        """g before each chain's first token."""
        return _at(self.fused, self._first_read(chains))

    def __call__(
        self, chains: Tensor, step: int, state: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """The states (b, c, width) of a step of `chains` (b, c), token numbers in the answers,
        from the `state` before; adds the step's keys and values (b, c, key heads, size)."""
        # A column of a chain that has ended may lie after the end of the text.
        places = (self.batch.prompts[:, None] + chains + step).clamp(
            max=self.batch.tokens.shape[1] - 1
        )
        both, residual = self._read(self.batch.tokens.gather(1, places), state)
        if step:
            key, value = self._keys_and_values(both, places)
            keys.append(key)
            values.append(value)
        query = self._rotated(self.attention.q_proj(both), places)
        attended = self._attend(query, self._first_read(chains), keys, values)
        state = residual + self.attention.o_proj(attended)
        after: Tensor = state + self.layer.mlp(self.layer.post_attention_layernorm(state))
        return after

    def _first_read(self, chains: Tensor) -> Tensor:
        """The column, among what step 0 reads, of each chain's first token."""
        columns = self.batch.prompts[:, None] + chains - 1
        return columns.clamp(max=self.batch.features.shape[1] - 1)

    def _read(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """What queries, keys and values are made of, and what is added to the attended."""
        normed = self.layer.hidden_norm(states)
        residual = normed if self.layer.norm_before_residual else states
        embedded = self.layer.input_layernorm(self.embed(tokens).to(states.dtype))
        return torch.cat([embedded, normed], dim=-1), residual

    def _keys_and_values(self, both: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        value = self.attention.v_proj(both)
        heads = value.view(*both.shape[:2], -1, self.attention.head_dim)
        return self._rotated(self.attention.k_proj(both), places), heads

    def _rotated(self, projected: Tensor, places: Tensor) -> Tensor:
        """(b, c, heads, size) of (b, c, heads · size), rotated to their places."""
        heads = projected.view(*projected.shape[:2], -1, self.attention.head_dim)
        cos, sin = (part[:, :, None] for part in self.head.rotary(heads, places))
        rotated: Tensor = heads * cos + rotate_half(heads) * sin
        return rotated

    def _attend(
        self, query: Tensor, reach: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Tensor:
        """Over the shared columns up to `reach` (b, c) and the chains' own keys; (b, c, width)."""
        b, c, heads, size = query.shape
        shared, groups = self.keys.shape[1], self.keys.shape[2]
        # (b, key heads, query heads of each, c, size)
        query = query.view(b, c, groups, heads // groups, size).permute(0, 2, 3, 1, 4)
        query = query * self.attention.scaling
        flat = query.reshape(b, groups, -1, size)
        scores = (flat @ self.keys.permute(0, 2, 3, 1)).view(*query.shape[:-1], shared)
        behind = torch.arange(shared, device=reach.device) > reach[..., None]
        scores = scores.masked_fill(behind[:, None, None], -torch.inf)
        own = [(query * _by_head(key)).sum(-1, keepdim=True) for key in keys]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(query.dtype)
        over_shared = weights[..., :shared].reshape(b, groups, -1, shared)
        attended = (over_shared @ self.values.transpose(1, 2)).view_as(query)
        for number, value in enumerate(values, start=shared):
            attended = attended + weights[..., number, None] * _by_head(value)
        return attended.permute(0, 3, 1, 2, 4).reshape(b, c, heads * size)


def _by_head(own: Tensor) -> Tensor:
    """(b, key heads, 1, c, size) of (b, c, key heads, size)."""
    return own.transpose(1, 2)[:, :, None]


def _first(going: Tensor) -> Tensor:
    """Columns (b, c) of each row's chains that continue, in order, and behind them of others; c is
    the most that continue in any row, :func:`rounded`."""
    width = rounded(max(int(going.sum(1).max()), 1))
    return torch.argsort(~going, dim=1, stable=True)[:, :width]


def _at(values: Tensor, columns: Tensor) -> Tensor:
    """`values` (b, n, …) at columns (b, c)."""
    index = columns.view(*columns.shape, *[1] * (values.ndim - 2))
    return values.gather(1, index.expand(*columns.shape, *values.shape[2:]))
