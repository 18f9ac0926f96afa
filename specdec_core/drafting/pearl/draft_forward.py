"""What one forward of the draft predicts at nodes of several slots' trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from specdec_core.drafting.drafter import SlotState
from specdec_core.drafting.pearl.draft_tree import Node, Source
from specdec_core.drafting.warped import warped
from specdec_core.models.runner import Batch, ModelRunner
from specdec_core.tokens.acceptance import Places, rule_of
from specdec_core.tokens.sampling import quantile


@dataclass(slots=True)
class DraftForward:
    """Predictions at n `nodes` (n,) of the trees of the slots `states` (n,): `logits`
    (n, vocabulary), under sampling the distributions `probs`, and `confidences` that the draft
    chooses each token; `hidden` (n, dimension), where watched."""

    states: list[SlotState]
    nodes: list[Node]
    logits: Tensor
    probs: Tensor | None
    hidden: Tensor | None
    confidences: Tensor

    @classmethod
    def of(
        cls,
        runner: ModelRunner,
        states: Sequence[SlotState],
        nodes: Sequence[Sequence[Node]],
        parents: Sequence[Sequence[int]],
    ) -> DraftForward:
        """Feed the draft `nodes[i]` of slot i; `parents[i]` are those of all nodes that its cache
        then holds."""
        feed = [[node.token for node in row] for row in nodes]
        output = runner.forward(Batch([state.slot for state in states], feed, parents))
        output = warped(output, states, lambda n: [_drafted(states[n], node) for node in nodes[n]])
        owners = [state for state, row in zip(states, nodes, strict=True) for _ in row]
        flat = [node for row in nodes for node in row]
        at = Places(
            [state.sampling for state in owners],
            [state.random for state in owners],
            [node.position + 1 for node in flat],
            output.logits,
            lambda: output.chosen,
        )
        return cls(owners, flat, at.logits, at.probs, output.hidden, at.confidences())

    def random(self, place: int) -> bool:
        """Whether the token there is drawn at random, for rejection sampling."""
        return rule_of(self.states[place].sampling).carries_q

    def draws(self) -> dict[int, tuple[int, float]]:
        """By place the tokens that are drawn at random, and their probabilities."""
        places = [n for n in range(len(self.nodes)) if self.random(n)]
        if not places:
            return {}
        assert self.probs is not None  # rejection sampling has distributions
        rows = self.probs[places]
        tokens = quantile(rows, [self.states[n].random.uniform() for n in places])
        chances = rows.gather(1, tokens[:, None])[:, 0].tolist()
        return dict(zip(places, zip(tokens.tolist(), chances, strict=True), strict=True))

    def sources(self, places: list[int], forward: int) -> Iterator[Source]:
        """What the tokens at these places are drawn from. A copy: the draft's next forward may
        overwrite its logits."""
        probs = [None] * len(places) if self.probs is None else self.probs[places]
        hidden = [None] * len(places) if self.hidden is None else self.hidden[places]
        for rows in zip(self.logits[places], probs, hidden, strict=True):
            yield Source(forward, *rows)


def _drafted(state: SlotState, node: Node) -> list[int]:
    """The tokens after the confirmed sequence on the way to `node`, its own included; none in the
    sequence itself, where nothing is drawn any more."""
    beyond = takewhile(lambda up: up.position >= len(state.tokens), node.up())
    return [up.token for up in beyond][::-1]
