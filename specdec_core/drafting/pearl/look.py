"""What the draft says, by one forward, at places of several slots' trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_core.drafting.drafter import SlotState
from specdec_core.drafting.pearl.canopy import Node, Source
from specdec_core.models.runner import ModelRunner
from specdec_core.tokens.acceptance import Places, rule_of
from specdec_core.tokens.sampling import quantile


@dataclass(slots=True)
class Look:
    """n places: behind `nodes` (n,) of the trees of `sequences` (n,). The draft's `logits` (n,
    vocabulary), under sampling the distributions `probs`, and `likely`, how confident the draft is
    in each token; `hidden` (n, dimension), where watched."""

    sequences: list[SlotState]
    nodes: list[Node]
    logits: Tensor
    probs: Tensor | None
    hidden: Tensor | None
    likely: Tensor

    @classmethod
    def of(
        cls,
        runner: ModelRunner,
        sequences: Sequence[SlotState],
        nodes: Sequence[Sequence[Node]],
        parents: Sequence[Sequence[int]],
    ) -> Look:
        """Feed the draft `nodes[i]` of slot i, whose tree in its cache then has these `parents`."""
        feed = [[node.token for node in own] for own in nodes]
        chains = all(own == list(range(-1, len(own) - 1)) for own in parents)
        slots = [sequence.slot for sequence in sequences]
        logits = runner.forward(slots, feed, None if chains else parents)
        counts = [len(own) for own in nodes]
        logits = _flat(logits, counts)
        hidden = None if runner.hidden is None else _flat(runner.hidden, counts)
        owners = [s for s, own in zip(sequences, nodes, strict=True) for _ in own]
        flat = [node for own in nodes for node in own]
        at = Places(
            [sequence.sampling for sequence in owners],
            [sequence.random for sequence in owners],
            [node.position + 1 for node in flat],
            logits,
            lambda: logits.argmax(dim=-1),
        )
        return cls(owners, flat, logits, at.probs, hidden, at.confidences())

    def exact(self, place: int) -> bool:
        """Whether the token there has to be drawn at random, for rejection sampling."""
        return rule_of(self.sequences[place].sampling).carries_q

    def draws(self) -> dict[int, tuple[int, float]]:
        """By place the tokens that are drawn at random, and their chances."""
        places = [n for n in range(len(self.nodes)) if self.exact(n)]
        if not places:
            return {}
        assert self.probs is not None  # of a place for rejection sampling
        own = self.probs[places]
        tokens = quantile(own, [self.sequences[n].random.uniform() for n in places])
        chances = own.gather(1, tokens[:, None])[:, 0].tolist()
        return dict(zip(places, zip(tokens.tolist(), chances, strict=True), strict=True))

    def sources(self, places: list[int], forward: int) -> Iterator[Source]:
        """What the tokens at these places are drawn from. A copy: the draft's next forward may
        write over its logits."""
        probs = [None] * len(places) if self.probs is None else self.probs[places]
        hidden = [None] * len(places) if self.hidden is None else self.hidden[places]
        for rows in zip(self.logits[places], probs, hidden, strict=True):
            yield Source(forward, *rows)


def _flat(states: Tensor, counts: Sequence[int]) -> Tensor:
    """The first so many entries of each row of `states` (rows, width, …), one behind the other."""
    if all(own == states.shape[1] for own in counts):
        return states.flatten(0, 1)
    return torch.cat([row[:own] for row, own in zip(states, counts, strict=True)])
