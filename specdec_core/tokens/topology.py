"""Shapes of token trees, and their attention masks: built once, then sliced (improved MCSD, §3.2).

Nodes are numbered parents first. So the first nodes of a tree are a tree themselves, and its mask
is the upper left corner of the whole mask. A forward that feeds some of the nodes needs their rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec_core.tokens.token_tree import ROOT

_KEPT = 512  # shapes remembered at once
_LEAST_CHAIN = 64  # tokens


def static_tree(children: Iterable[Sequence[int]]) -> list[int]:
    """The parents of a tree, numbered level by level, in which `children[i]` has the number of
    children of each node of level i; level 0 is the sequence's last token."""
    parents: list[int] = []
    level: Sequence[int] = [ROOT]
    for counts in children:
        first = len(parents)
        for node, count in zip(level, counts, strict=True):
            parents += [node] * count
        level = range(first, len(parents))
    return parents


def after_text(count: int, parents: Iterable[int]) -> list[int]:
    """The parents when the sequence's last `count` tokens are fed with the tree, as first nodes."""
    return [*range(ROOT, count - 1), *(parent + count for parent in parents)]


class Topology:
    """The shape of a tree: its `parents`, the `depths` of its nodes, and its masks. Given a
    topology that it `begins` with, only the other nodes are computed."""

    def __init__(
        self,
        parents: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        begins: Topology | None = None,
    ) -> None:
        self.parents, self.dtype, self.device = tuple(parents), dtype, device
        known = 0 if begins is None else len(begins)
        self.depths: list[int] = [] if begins is None else begins.depths[:]
        sees = self._sees = np.zeros((len(self), len(self)), dtype=bool)
        if begins is not None:
            sees[:known, :known] = begins._sees
        for node, parent in enumerate(self.parents[known:], known):
            self.depths.append(0 if parent == ROOT else self.depths[parent] + 1)
            if parent != ROOT:
                sees[node] = sees[parent]
            sees[node, node] = True
        self._masks: dict[int | None, Tensor] = {}

    def __len__(self) -> int:
        return len(self.parents)

    def among_nodes(self, window: int | None) -> Tensor:
        """The additive mask (nodes, nodes) between the nodes, with or without a sliding window."""
        mask = self._masks.get(window)
        if mask is None:
            sees = self._sees
            if window is not None:
                depths = np.array(self.depths)
                sees = sees & (depths[:, None] - depths < window)
            added = np.where(sees, 0, torch.finfo(self.dtype).min).astype(np.float32)
            mask = self._masks[window] = torch.from_numpy(added).to(self.device, self.dtype)
        return mask

    def mask(self, start: int, nodes: range, window: int | None) -> Tensor:
        """The additive mask (nodes, positions) of the forward that feeds `nodes`, of a tree after
        `start` tokens, over the tokens and all nodes up to the last one fed."""
        among = self.among_nodes(window)[nodes.start : nodes.stop, : nodes.stop]
        before = among.new_zeros((len(nodes), start))
        if window is not None:
            depths = torch.tensor(self.depths[nodes.start : nodes.stop], device=self.device)
            distance = start + depths[:, None] - torch.arange(start, device=self.device)
            before.masked_fill_(distance >= window, torch.finfo(self.dtype).min)
        return torch.cat([before, among], dim=1)


class Topologies:
    """The shapes that the forwards of a model feed. Each is built once, then sliced."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        self._made_for = dtype, device
        self._chain = Topology([])
        self._known: dict[tuple[int, ...], Topology] = {}

    def expect(self, parents: Sequence[int]) -> Topology:
        """Build the shape of a tree, numbered level by level, before the tree grows: its first
        levels are slices of it."""
        topology = self.find(parents)
        for node in range(1, len(topology)):
            if topology.depths[node] > topology.depths[node - 1]:
                self._known[topology.parents[:node]] = topology
        return topology

    def find(self, parents: Sequence[int], new: int = 0) -> Topology:
        """A topology that begins with `parents`; it extends a known one without the last `new`
        nodes, if there is one."""
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
