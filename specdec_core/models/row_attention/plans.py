"""What each token of a packed forward sees of the cache, and the two ways to attend to that: with
torch's attention, called for each row, or with the project's own operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specdec_core.models.row_attention.operator import attend
from specdec_core.tokens.token_tree import ROOT
from specdec_core.tokens.topology import Topology


@dataclass(frozen=True, slots=True)
class RowTokens:
    """A part of a packed sequence that belongs to one row: its tokens [first, last) are at
    positions [end - (last - first), end) of slot `row`.

    They are a sequence's next tokens, or with `parents` the last nodes of a tree, which is no chain
    and begins at position `start`. They are the nodes of `topology` from number `node` on."""

    row: int
    first: int
    last: int
    start: int
    end: int
    parents: Sequence[int] | None
    topology: Topology
    node: int

    def mask(self, window: int | None) -> Tensor:
        """The additive mask (tokens, end), with or without a sliding window."""
        nodes = range(self.node, self.node + self.last - self.first)
        return self.topology.mask(self.start, nodes, window)


class RowMask(Tensor):
    """A plan that models pass on unchanged, because it is a mask to them. As a tensor it is empty;
    it has four dimensions, as transformers expects of masks that are ready."""

    plan: MaskedSpans | OperatorPlan

    @classmethod
    def empty(cls) -> RowMask:
        """A mask without a plan yet."""
        return torch.empty((1, 1, 0, 0)).as_subclass(cls)

    @classmethod
    def of(cls, plan: MaskedSpans | OperatorPlan) -> RowMask:
        """A mask for `plan`."""
        mask = cls.empty()
        mask.plan = plan
        return mask


class MaskedSpans:
    """Torch's attention, called for each row. `window` is the layers' sliding window."""

    def __init__(self, rows: Sequence[RowTokens], window: int | None) -> None:
        self._spans: list[tuple[slice, slice, slice, Tensor | None]] = []
        for own in rows:
            begin, mask = 0, None
            if own.parents is None and own.last == own.first + 1:  # a range, which needs no mask
                begin = max(own.end - window, 0) if window else 0
            else:
                mask = own.mask(window)[None, None]
            seen = slice(begin, own.end)
            self._spans.append(
                (slice(own.first, own.last), slice(own.row, own.row + 1), seen, mask)
            )

    def attend(
        self, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        """Attention (1, tokens, heads, head size) of `query` (1, heads, tokens, head size) to the
        whole cache, `keys` and `values` (slots, key heads, positions, head size), with the
        `options` of transformers' attention functions."""
        dtype, query = query.dtype, query.to(keys.dtype)
        parts = [
            sdpa_attention_forward(
                module, query[:, :, own], keys[row, :, seen], values[row, :, seen], mask, **options
            )[0]
            for own, row, seen, mask in self._spans
        ]
        return (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]).to(dtype)


class OperatorPlan:
    """The project's operator, called once; `tokens`, `nodes` and `blocks` are its tables, see
    :func:`~specdec_core.models.row_attention.operator.attend`."""

    def __init__(self, tokens: Tensor, nodes: Tensor, blocks: Tensor | None = None) -> None:
        self._tables = tokens, nodes, blocks

    def attend(
        self, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        """As :meth:`MaskedSpans.attend`; to the cache, or to its blocks (1, key heads, all
        positions, head size)."""
        tokens, nodes, blocks = self._tables
        scaling = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        rows = query[0].transpose(0, 1)
        return attend(rows, keys, values, tokens, nodes, scale, blocks)[None]


class SeenPlaces:
    """The operator's tables as numbers: `tokens`, one line after the other, and `nodes`. `window`
    is the layers' sliding window.

    A token sees the positions [first, end) of its slot and, in a tree, its ancestors and itself.
    With a sliding window it sees only the last positions of the sequence."""

    def __init__(self, rows: Sequence[RowTokens], window: int | None) -> None:
        tokens: list[int] = []
        nodes: list[int] = []
        for own in rows:
            count = own.last - own.first
            if own.parents is None:
                for end in range(own.end - count + 1, own.end + 1):
                    begin = max(end - window, 0) if window else 0
                    tokens += (own.row, begin, end, 0, 0)
                continue
            for node in range(len(own.parents) - count, len(own.parents)):
                path = _path(own.parents, node)
                begin = max(own.start + len(path) - window, 0) if window else 0
                kept = path[-window:] if window else path
                tokens += (own.row, min(begin, own.start), own.start, len(nodes), len(kept))
                nodes += [own.start + ancestor for ancestor in kept]
        self.tokens, self.nodes = tokens, nodes or [0]

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The tables as tensors, (tokens, 5) and (nodes,)."""
        tokens = torch.tensor(self.tokens, dtype=torch.int32, device=device).view(-1, 5)
        return tokens, torch.tensor(self.nodes, dtype=torch.int32, device=device)


def _path(parents: Sequence[int], node: int) -> list[int]:
    """A node and its ancestors, the root's child first."""
    path = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]
