"""How many of a head's candidates its target accepts, from the head's steps over texts.

The texts are the target's own. On a greedy one a chain survives as long as the head's best token is
the text's. On a sampled one it survives with the probability that rejection sampling accepts the
text's token, for which

    E_{x~p} Π_{j<k} min(1, q_j(x_j) / p_j(x_j))

is the probability of k accepted candidates: Σ_x p(x) min(1, q(x) / p(x)) = Σ_x min(p(x), q(x)).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_core.config import Value
from specdec_core.models.eagle import EagleHead
from specdec_core.training.eagle.unrolled import Step
from specdec_core.training.recorded.batch import Batch
from specdec_core.training.recorded.loss import probabilities

_ROWS = 64


class Acceptance(Value):
    """The probability that a chain's candidate is accepted if those before it are, by position."""

    greedy: tuple[float, ...]
    sampled: tuple[float, ...]  # at temperature 1

    @property
    def greedy_length(self) -> float:
        """Expected accepted candidates of a greedy chain."""
        return expected_length(self.greedy)

    @property
    def sampled_length(self) -> float:
        """The same at temperature 1."""
        return expected_length(self.sampled)

    @property
    def length(self) -> float:
        """Of greedy chains, or of sampled ones where no text is greedy."""
        return self.greedy_length if self.greedy else self.sampled_length


def expected_length(by_position: Sequence[float]) -> float:
    """a_1 + a_1 a_2 + …"""
    survival = torch.tensor([1.0, *by_position]).cumprod(0)
    return float(survival[1:].sum())


class AcceptanceCounts:
    """Adds up the acceptance of batches."""

    def __init__(self, steps: int) -> None:
        # Chains alive before each step, and what is accepted of them; greedy and sampled.
        self.alive, self.accepted = torch.zeros(2, 2, steps, dtype=torch.float64)

    def add(self, head: EagleHead, batch: Batch, steps: Sequence[Step], output: Tensor) -> None:
        """Count the steps of all chains of a batch; `output` are the target's output layer's rows
        of the draft vocabulary."""
        kinds = torch.stack([batch.temperatures == 0, batch.temperatures == 1])
        alive = torch.ones(batch.last.shape[:2])
        for number, step in enumerate(steps):
            accepted, follows = _judge(head, batch, step, output)
            before = alive[step.texts, step.starts]
            for kind, texts in enumerate(kinds):
                chosen = texts[step.texts]
                self.alive[kind, number] += before[chosen].sum()
                self.accepted[kind, number] += (before * accepted)[chosen].sum()
            alive[step.texts, step.starts] = before * follows

    def result(self) -> Acceptance:
        """By position, of the texts so far."""
        greedy, sampled = (self.accepted / self.alive.clamp(min=1e-9)).tolist()
        counted = self.alive.sum(1) > 0
        return Acceptance(
            greedy=tuple(greedy) if counted[0] else (), sampled=tuple(sampled) if counted[1] else ()
        )


def _judge(head: EagleHead, batch: Batch, step: Step, output: Tensor) -> tuple[Tensor, Tensor]:
    """The probability that the candidate after each row is accepted, and that the text's own token
    is, (rows,) each."""
    accepted, follows = torch.empty(2, len(step.texts))
    numbers = torch.full((head.settings.vocab_size,), -1)
    numbers[head.proposable] = torch.arange(len(head.proposable))
    places = batch.prompts[step.texts] + step.positions + 1
    following = numbers[batch.tokens[step.texts, places]]
    greedy = batch.temperatures[step.texts] == 0
    for first in range(0, len(step.texts), _ROWS):
        rows = slice(first, first + _ROWS)
        where = step.texts[rows], step.positions[rows]
        q = head.logits(step.states[rows]).float().softmax(-1)
        p = probabilities(batch.last[where], batch.normaliser[where], output).float()
        best = head.proposable[q.argmax(-1)] == batch.best[where]
        token = following[rows, None].clamp(min=0)
        ratio = q.gather(1, token) / p.gather(1, token)
        ratio = ratio.squeeze(1).clamp(max=1) * (following[rows] >= 0)
        # The text's token is the target's best, up to ties of rounding.
        right = q.argmax(-1) == following[rows]
        accepted[rows] = torch.where(greedy[rows], best.float(), torch.minimum(p, q).sum(-1))
        follows[rows] = torch.where(greedy[rows], right.float(), ratio)
    return accepted, follows
