"""What the draft says, by one forward, at places of several slots' trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec_core.drafting.drafter import SlotState
from specdec_core.drafting.pearl.canopy import Node, Source
from specdec_core.models.runner import Batch, ModelRunner
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
        output = runner.forward(Batch([sequence.slot for sequence in sequences], feed, parents))
        owners = [s for s, own in zip(sequences, nodes, strict=True) for _ in own]
        flat = [node for own in nodes for node in own]
        at = Places(
            [sequence.sampling for sequence in owners],
            [sequence.random for sequence in owners],
            [node.position + 1 for node in flat],
            output.logits,
            lambda: output.chosen,
        )
        return cls(owners, flat, at.logits, at.probs, output.hidden, at.confidences())

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
