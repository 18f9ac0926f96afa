"""Two ways to attend row by row: with torch's attention, or with the project's own operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specdec_core.models.row_attention.operator import attend
from specdec_core.tokens.token_tree import ROOT
from specdec_core.tokens.topology import Slices


@dataclass(frozen=True, slots=True)
class RowTokens:
    """A row's part of a packed sequence: its tokens [first, last) are at positions
    [end - (last - first), end) of slot `row`.

    They are a text's next tokens, or with `parents` the last nodes of a tree, which is no chain and
    begins at position `start`; `slices` are those of the mask for the row alone."""

    row: int
    first: int
    last: int
    start: int
    end: int
    parents: Sequence[int] | None
    slices: Slices


class MaskedSpans:
    """Torch's attention, called for each row. `window` is the layers' sliding window."""

    def __init__(self, rows: Sequence[RowTokens], window: int | None) -> None:
        self._spans: list[tuple[slice, slice, slice, Tensor | None]] = []
        for own in rows:
            begin, mask = 0, None
            if own.slices.single:  # a range, which needs no mask
                begin = max(own.end - window, 0) if window else 0
            else:
                mask = own.slices.mask(torch.tensor([[own.start]]), own.end, window)
            seen = slice(begin, own.end)
            self._spans.append(
                (slice(own.first, own.last), slice(own.row, own.row + 1), seen, mask)
            )

    def attend(
        self, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        dtype, query = query.dtype, query.to(keys.dtype)
        parts = [
            sdpa_attention_forward(
                module, query[:, :, own], keys[row, :, seen], values[row, :, seen], mask, **options
            )[0]
            for own, row, seen, mask in self._spans
        ]
        return torch.cat(parts, dim=1).to(dtype)


class SeenPlaces:
    """The project's operator, called once. `window` is the layers' sliding window.

    A token sees the positions [first, end) of its slot and, in a tree, its ancestors and itself.
    Of these a sliding window leaves the last ones, by their places in the text. The operator's
    tables are `tokens`, one line after the other, and `nodes`; `blocks` is the cache's, where it
    has one."""

    def __init__(
        self, rows: Sequence[RowTokens], window: int | None, blocks: Tensor | None = None
    ) -> None:
        self.blocks = blocks
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
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The operator's tables, (tokens, 5) and (nodes,)."""
        if self._tables is None:
            tokens = torch.tensor(self.tokens, dtype=torch.int32, device=device).view(-1, 5)
            self._tables = tokens, torch.tensor(self.nodes, dtype=torch.int32, device=device)
        return self._tables

    def attend(
        self, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        tables = *self.tables(keys.device), self.blocks
        return attend_to(*tables, query, keys, values, options.get("scaling"))


class SeenTensors:
    """The operator, with tables that are tensors already, as a graph has them."""

    def __init__(self, tokens: Tensor, nodes: Tensor, blocks: Tensor | None = None) -> None:
        self.tables = tokens, nodes, blocks

    def attend(
        self, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        return attend_to(*self.tables, query, keys, values, options.get("scaling"))


def attend_to(
    tokens: Tensor,
    nodes: Tensor,
    blocks: Tensor | None,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
) -> Tensor:
    """See :meth:`RowPlan.attend`, by the operator; `tokens`, `nodes` and `blocks` are its
    arguments."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = query[0].transpose(0, 1)
    return attend(rows, keys, values, tokens, nodes, scale, blocks)[None]


def _path(parents: Sequence[int], node: int) -> list[int]:
    """A node and its ancestors, the root's child first."""
    path = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]
