"""Growing token trees in a draft model: one forward pass a level, for all slots together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_core.config import Sampling
from specdec_core.drafting.context import DraftContext
from specdec_core.drafting.drafter import Sequencing
from specdec_core.tokens.sampling import draw_siblings, warp
from specdec_core.tokens.statistics import Origin
from specdec_core.tokens.token_tree import ROOT, TokenTree


@dataclass(slots=True)
class Level:
    """Where trees may go on, n places of several trees, and what the draft model says there."""

    trees: list[int]  # (n,) which tree
    nodes: list[int]  # (n,) behind which of its nodes, or ROOT
    logits: Tensor  # (n, vocabulary)
    hidden: Tensor | None  # (n, dimension) what the output layer made them from, where watched


@dataclass(slots=True)
class Children:
    """What was put behind the n places of a level."""

    nodes: list[list[int]]  # (n,) new nodes, in the order drawn
    probs: Tensor | None  # (n, vocabulary) the draft distributions; None when all are greedy


class Growth:
    """The trees of one round, one for each of `sequences`.

    `cached[i]` says which nodes of tree i the draft model has read, and as the how-manieth token
    behind the committed text.
    """

    def __init__(
        self, context: DraftContext, sequences: Sequence[Sequencing], vocab_size: int
    ) -> None:
        self.context, self.sequences, self.vocab_size = context, sequences, vocab_size
        self.trees = [TokenTree() for _ in sequences]
        self.cached: list[dict[int, int]] = [{} for _ in sequences]
        self._read: dict[int, list[int]] = {}  # the parents of what was read of each tree

    def read(self, wanted: Mapping[int, Sequence[int]]) -> Level:
        """Feed the draft model the nodes `wanted[i]` of tree i, in their order and parents first;
        or [ROOT], to begin with. What it has not read of the text goes before them."""
        feed, parents, places = [], [], []
        for i, nodes in wanted.items():
            tree, cached = self.trees[i], self.cached[i]
            text = [] if i in self._read else self.context.pending(self.sequences[i])
            own = self._read.setdefault(i, [])
            new = [node for node in nodes if node != ROOT]
            for node in new:
                parent = tree.parents[node]
                cached[node] = len(own)
                own.append(ROOT if parent == ROOT else cached[parent])
            feed.append(text + [tree.tokens[node] for node in new])
            parents.append(_behind(text, own) if text else own)
            places.append(range(len(feed[-1]) - len(nodes), len(feed[-1])))
            tree.draft_forwards += 1
            tree.draft_tokens += len(nodes)
        runner = self.context.runner
        rows = [self.sequences[i].slot for i in wanted]
        chains = all(own == list(range(-1, len(own) - 1)) for own in parents)
        logits = runner.forward(rows, feed, None if chains else parents)
        return Level(
            [i for i, nodes in wanted.items() for _ in nodes],
            [node for nodes in wanted.values() for node in nodes],
            _at(logits, places)[:, : self.vocab_size],
            None if runner.hidden is None else _at(runner.hidden, places),
        )

    def branch(self, level: Level, counts: Sequence[int], replacement: bool = False) -> Children:
        """Put `counts[n]` children behind place n of `level`: drawn from the draft distribution,
        fewer where it has fewer tokens and none is drawn twice; when greedy the most likely tokens.
        """
        alike: dict[Sampling, list[int]] = {}
        for place, i in enumerate(level.trees):
            alike.setdefault(self.sequences[i].sampling, []).append(place)
        nodes: list[list[int]] = [[] for _ in counts]
        probs = None
        if len(alike) > 1:  # at temperature 1 where greedy, as Signals has it
            probs = level.logits.float().softmax(dim=-1)
        for sampling, places in alike.items():
            logits = level.logits if len(alike) == 1 else level.logits[places]
            own = [counts[place] for place in places]
            most = min(max(own), logits.shape[-1])
            sources: list[Tensor] = []
            if sampling.greedy:
                tokens = logits.topk(most).indices.tolist()
            else:
                q = warp(logits, sampling)
                if len(alike) == 1:
                    probs = q
                else:
                    probs[places] = q
                if sampling.coupling == "gumbel":
                    best = (q / self._noise(level, places)).topk(most)
                    won = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                    tokens = [[t for t, score in zip(*row, strict=True) if score] for row in won]
                else:
                    uniforms = self._uniforms(level, places, own)
                    tokens, sources = draw_siblings(q, uniforms, replacement)
            drawn_from = [source.unbind() for source in sources]
            for row, (place, count) in enumerate(zip(places, own, strict=True)):
                tree, parent = self.trees[level.trees[place]], level.nodes[place]
                nodes[place] = [
                    tree.add(token, parent, Origin.DRAFT, drawn_from[n][row] if sources else None)
                    for n, token in enumerate(tokens[row][:count])
                ]
        return Children(nodes, probs)

    def _uniforms(
        self, level: Level, places: Sequence[int], counts: Sequence[int]
    ) -> list[list[float]]:
        """Each place's uniform numbers, from its own request's stream."""
        streams = [self.sequences[level.trees[place]].random for place in places]
        pairs = zip(streams, counts, strict=True)
        return [[stream.uniform() for _ in range(count)] for stream, count in pairs]

    def _noise(self, level: Level, places: Sequence[int]) -> Tensor:
        """The noise (places, vocabulary) that each place's children share with the target: its
        winners, as many as there are children, are the candidates."""
        size = level.logits.shape[-1]
        rows = []
        for place in places:
            sequence, tree = self.sequences[level.trees[place]], self.trees[level.trees[place]]
            position, node = len(sequence.tokens), level.nodes[place]
            while node != ROOT:
                position, node = position + 1, tree.parents[node]
            rows.append(sequence.random.noise.at(position, self.vocab_size)[:size])
        return torch.stack(rows).to(level.logits.device)


def _behind(text: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The parents when the tree is fed together with the end of the text before it."""
    last = len(text) - 1
    return [*range(-1, last), *(parent + len(text) for parent in parents)]


def _at(states: Tensor, places: Sequence[range]) -> Tensor:
    """The entries (n, …) at each row's own places of `states` (rows, width, …)."""
    if all(own == range(states.shape[1]) for own in places):
        return states.flatten(0, 1)
    rows = [row for row, own in enumerate(places) for _ in own]
    return states[rows, [place for own in places for place in own]]
