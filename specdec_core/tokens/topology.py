"""Attention masks of token trees, built once and then sliced (improved MCSD, §3.2).

Nodes are numbered parents first. So the first nodes of a tree are a tree themselves, whose mask is
the upper left corner of the whole mask. A forward of some nodes needs their rows of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from specdec_core.tokens.token_tree import ROOT

_KEPT = 512  # shapes remembered at once
_LEAST_CHAIN = 64


def static_tree(children: Iterable[Sequence[int]]) -> list[int]:
    """The parents of a tree, numbered level by level, in which `children[i]` has the number of
    children of each node of level i, level 0 being the text's last token."""
    parents: list[int] = []
    level: Sequence[int] = [ROOT]
    for counts in children:
        first = len(parents)
        for node, count in zip(level, counts, strict=True):
            parents += [node] * count
        level = range(first, len(parents))
    return parents


def k_configuration(branching: Iterable[int]) -> list[int]:
    """The parents of a tree in which each node of level i has `branching[i]` children."""
    children, width = [], 1
    for count in branching:
        children.append([count] * width)
        width *= count
    return static_tree(children)


def fork(width: int, depth: int) -> list[int]:
    """The parents of `width` chains of `depth` nodes, numbered level by level."""
    return k_configuration([width, *[1] * (depth - 1)])


def after_text(count: int, parents: Iterable[int]) -> list[int]:
    """The parents when the text's last `count` tokens are fed with the tree, as first nodes."""
    return [*range(ROOT, count - 1), *(parent + count for parent in parents)]


class Topology:
    """The shape of a tree: its `parents`, the `depths` (nodes,) of its nodes, and its masks. Given
    a topology that it `begins` with, only the other nodes are computed."""

    def __init__(
        self,
        parents: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        begins: Topology | None = None,
    ) -> None:
        self.parents, self.dtype, self.device = tuple(parents), dtype, device
        known = 0 if begins is None else len(begins)
        self.depth_list: list[int] = [] if begins is None else begins.depth_list[:]
        sees = self._sees = np.zeros((len(self), len(self)), dtype=bool)
        if begins is not None:
            sees[:known, :known] = begins._sees
        for node, parent in enumerate(self.parents[known:], known):
            self.depth_list.append(0 if parent == ROOT else self.depth_list[parent] + 1)
            if parent != ROOT:
                sees[node] = sees[parent]
            sees[node, node] = True
        self._masks: dict[int | None, Tensor] = {}

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> Tensor:
        return torch.tensor(self.depth_list, dtype=torch.long)

    def mask(self, window: int | None) -> Tensor:
        """The whole additive mask (nodes, 1 + nodes + 1), with or without a sliding window. Column
        0 stands for the text, column 1 + i for node i, and the last column for whatever comes after
        the tree, which no node sees. The part of the text outside the window is not masked here."""
        mask = self._masks.get(window)
        if mask is None:
            sees = self._sees
            if window is not None:
                depths = np.array(self.depth_list)
                sees = sees & (depths[:, None] - depths < window)
            full = np.full((len(self), len(self) + 2), torch.finfo(self.dtype).min, np.float32)
            full[:, 0] = 0
            full[:, 1:-1][sees] = 0
            mask = self._masks[window] = torch.from_numpy(full).to(self.device, self.dtype)
        return mask

    def rows(self, window: int | None, first: int, count: int) -> Tensor:
        """Rows of :meth:`mask`, (1, count, columns), in its memory."""
        return self.mask(window)[None, first : first + count]


class Topologies:
    """The shapes of a model's forwards. Each is built once, then sliced."""

    def __init__(self, positions: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self._made_for = dtype, device
        self._columns = torch.arange(positions, device=device)
        self._chain = Topology([])
        self._known: dict[tuple[int, ...], Topology] = {}

    def expect(self, parents: Sequence[int]) -> Topology:
        """Build the mask of a tree, numbered level by level, before the tree grows: the masks of
        its first levels are slices."""
        topology = self.find(parents)
        depths = topology.depths.tolist()
        for node in range(1, len(depths)):
            if depths[node] > depths[node - 1]:
                self._known[topology.parents[:node]] = topology
        return topology

    def find(self, parents: Sequence[int], new: int = 0) -> Topology:
        """A topology that begins with `parents`, of which all but the last `new` may be known
        already."""
        key = tuple(parents)
        topology = self._known.get(key)
        if topology is None:
            begins = self._known.get(key[: len(key) - new])
            if begins is not None and len(begins) != len(key) - new:
                begins = None  # it continues in another way
            if len(self._known) >= _KEPT:
                self._known.clear()
            topology = self._known[key] = Topology(key, *self._made_for, begins)
        return topology

    def chain(self, width: int) -> Topology:
        """A chain of at least `width` tokens."""
        if len(self._chain) < width:
            size = max(_LEAST_CHAIN, 1 << (width - 1).bit_length())
            self._chain = Topology(range(-1, size - 1), *self._made_for)
        return self._chain

    def slices(
        self,
        counts: Sequence[int],
        width: int,
        parents: Sequence[Sequence[int] | None] | None = None,
    ) -> Slices:
        """For a forward of `width` tokens a row, of which the first `counts[i]` are not padding:
        the last nodes of the tree `parents[i]`, or a chain. The nodes of a chain that the cache
        holds already count as text."""
        rows = []
        for n, count in enumerate(counts):
            tree = None if parents is None else parents[n]
            if tree is None or list(tree) == list(range(-1, len(tree) - 1)):
                rows.append((self.chain(width), 0, count))
            else:
                rows.append((self.find(tree, count), len(tree) - count, count))
        return Slices(rows, width, self._columns)


class Slices:
    """The slices of the masks for the tokens of one forward. Row i feeds the nodes `first[i]`,
    `first[i]` + 1, …, at the depths `depths[i]`; `depths` is (rows, width)."""

    def __init__(
        self, rows: Sequence[tuple[Topology, int, int]], width: int, columns: Tensor
    ) -> None:
        self._rows, self._width, self._columns = rows, width, columns
        self.first = [first for _, first, _ in rows]
        topology, first, _ = rows[0]
        self.single = len(rows) == width == 1 and first == 0  # a token that sees everything
        # The usual case, static trees and chains. The masks of padding do not matter.
        self._alike = first + width <= len(topology) and all(
            other is topology and begin == first for other, begin, _ in rows
        )

    @cached_property
    def depths(self) -> Tensor:
        """(rows, width)"""
        topology, first, _ = self._rows[0]
        if self._alike:
            return topology.depths[first : first + self._width].expand(len(self._rows), -1)
        depths = torch.zeros((len(self._rows), self._width), dtype=torch.long)
        for row, (topology, begin, count) in enumerate(self._rows):
            depths[row, :count] = topology.depths[begin : begin + count]
        return depths

    def mask(self, starts: Tensor, end: int, window: int | None) -> Tensor:
        """Additive mask (rows, 1, width, end) over the first `end` positions of the cache; row i's
        tree begins at position `starts[i]` (rows, 1)."""
        sliced, columns = self.sees(window), self._columns[:end]
        index = (columns - starts + 1).clamp_(0, sliced.shape[2] - 1)
        mask = sliced.gather(2, index[:, None].expand(-1, self._width, -1))
        if window is not None:
            # Column start + i holds a node no deeper than i: no visible node is masked.
            places = starts + self.depths.to(starts.device)
            mask.masked_fill_(places[..., None] - columns >= window, torch.finfo(mask.dtype).min)
        return mask[:, None]

    def depth_rows(self) -> list[list[int]]:
        """`depths` as lists."""
        if not self._alike:
            return self.depths.tolist()
        topology, first, _ = self._rows[0]
        return [topology.depth_list[first : first + self._width]] * len(self._rows)

    def sees(self, window: int | None) -> Tensor:
        """Each row's slice of :meth:`Topology.mask`, (rows, width, columns)."""
        rows, width = self._rows, self._width
        if self._alike:
            topology, first, _ = rows[0]
            return topology.rows(window, first, width).expand(len(rows), -1, -1)
        masks = [topology.rows(window, first, count)[0] for topology, first, count in rows]
        most = max(mask.shape[1] for mask in masks)
        blocked = torch.finfo(masks[0].dtype).min
        padded = masks[0].new_full((len(rows), width, most), blocked)
        for row, mask in enumerate(masks):
            padded[row, : mask.shape[0], : mask.shape[1]] = mask
        return padded
