"""The new tokens of several rows as one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec_core.models.row_attention.plans import RowTokens
from specdec_core.models.runner import Batch
from specdec_core.tokens.topology import Topologies


@dataclass(slots=True)
class PackedSequence:
    """The tokens of a batch, row after row: their ids, their positions in their sequences, the
    numbers of the tokens with `wanted` logits, and the part that belongs to each row."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    rows: list[RowTokens] = field(default_factory=list)

    @classmethod
    def of(cls, batch: Batch, ends: Sequence[int], topologies: Topologies) -> PackedSequence:
        """The tokens of `batch`, after which its rows hold `ends` tokens."""
        packed = cls([token for row in batch.tokens for token in row])
        positions = packed.positions
        rows = zip(batch.rows, batch.tokens, batch.counts, ends, strict=True)
        for number, (row, own, counted, end) in enumerate(rows):
            tree = None if batch.parents is None else batch.parents[number]
            for count, parents in _chain_and_tree(len(own), tree):
                first, last = len(positions), len(positions) + count
                if parents is None:
                    at = end - len(own) + count
                    start, node, shape = at - count, 0, topologies.chain(count)
                    positions += range(start, at)
                else:
                    at = end
                    node, shape = len(parents) - count, topologies.find(parents, count)
                    start = at - len(parents)
                    positions += [start + depth for depth in shape.depths[node : node + count]]
                packed.rows.append(RowTokens(row, first, last, start, at, parents, shape, node))
            packed.wanted += range(len(positions) - counted, len(positions))
        return packed


def _chain_and_tree(
    count: int, parents: Sequence[int] | None
) -> list[tuple[int, Sequence[int] | None]]:
    """A row's `count` new tokens as parts, (tokens, parents) each: the chain that its tree begins
    with, and the rest."""
    if parents is None:
        return [(count, None)]
    chain = next((n for n, parent in enumerate(parents) if parent != n - 1), len(parents))
    if chain == len(parents):
        return [(count, None)]
    if len(parents) > count:  # a tree that grows: its first nodes are there already
        return [(count, parents)]
    # The sequence's last token stays with the tree, which then has the same shape in all rounds.
    chain = min([chain, *(parent + 1 for parent in parents[chain:])]) - 1
    if chain < 1:
        return [(count, parents)]
    tree = [parent - chain for parent in parents[chain:]]
    return [(chain, None), (count - chain, tree)]
