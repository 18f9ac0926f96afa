"""How many of a head's candidates its target accepts, from the head's steps over texts.

The texts are the target's own. On a greedy one a chain survives as long as the head's best token is
the text's. On a sampled one it survives with the probability that rejection sampling accepts the
text's token, for which

    E_{x~p} Π_{j<k} min(1, q_j(x_j) / p_j(x_j))

is the probability of k accepted candidates: Σ_x p(x) min(1, q(x) / p(x)) = Σ_x min(p(x), q(x)).

That is a chain from a token drawn at random. A decoder's rounds begin where candidates have failed,
so they get less. How many rounds a text takes follows from its own chains; see :func:`rounds`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_core.config import Value
from specdec_core.models.eagle import EagleHead
from specdec_core.training.eagle.unrolled import UnrolledStep
from specdec_core.training.recorded.features import TextBatch
from specdec_core.training.recorded.loss import parts, probabilities


class Acceptance(Value):
    """The probability that a chain's candidate is accepted if those before it are, by position, of
    chains from all tokens; and where it was counted, the tokens of a round when these texts are
    decoded (MAT)."""

    greedy: tuple[float, ...]
    sampled: tuple[float, ...]  # at temperature 1
    greedy_tokens: float | None = None
    sampled_tokens: float | None = None

    @property
    def kinds(self) -> dict[str, tuple[tuple[float, ...], float, float | None]]:
        """By how texts were decoded: acceptance by position, the accepted candidates of a chain
        from any token, and the tokens of a round."""
        kinds = {
            "greedy": (self.greedy, self.greedy_tokens),
            "temperature 1": (self.sampled, self.sampled_tokens),
        }
        return {
            name: (positions, expected_length(positions), tokens)
            for name, (positions, tokens) in kinds.items()
            if positions
        }


def expected_length(by_position: Sequence[float]) -> float:
    """The expected accepted candidates of a chain, a_1 + a_1 a_2 + …"""
    survival = torch.tensor([1.0, *by_position]).cumprod(0)
    return float(survival[1:].sum())


def rounds(survival: Tensor, lengths: Tensor) -> Tensor:
    """The expected rounds in which texts are decoded (b,).

    With S_k(s) the probability that a chain from token s still follows the text after k candidates,
    a round from there accepts k of them with probability S_k - S_{k+1}, and the next one begins
    behind the target's own token: R(s) = 1 + Σ_k (S_k(s) - S_{k+1}(s)) R(s + k + 1), and 0 at the
    text's end. A sampled text is the target's, so given the text candidate x is accepted with
    probability min(1, q(x) / p(x)).

    Args:
        survival: S_1, S_2, … from each token (b, n, steps); 0 after the end of the text.
        lengths: the tokens of each text after its first (b,).
    """
    b, n, steps = survival.shape
    ones, zeros = survival.new_ones(b, n, 1), survival.new_zeros(b, n, 1)
    accepted = torch.cat([ones, survival], 2) - torch.cat([survival, zeros], 2)
    left = survival.new_zeros(b, n + steps + 1)
    for start in range(n - 1, -1, -1):
        behind = left[:, start + 1 : start + steps + 2]
        found = 1 + (accepted[:, start] * behind).sum(1)
        left[:, start] = torch.where(start < lengths, found, 0.0)
    return left[:, 0]


class AcceptanceCounts:
    """Adds up the acceptance of batches."""

    def __init__(self, steps: int) -> None:
        # Chains alive before each step, and what is accepted of them; greedy and sampled.
        self.alive, self.accepted = torch.zeros(2, 2, steps, dtype=torch.float64)
        self.tokens, self.rounds = torch.zeros(2, 2, dtype=torch.float64)

    def add(
        self, head: EagleHead, batch: TextBatch, steps: Sequence[UnrolledStep], output: Tensor
    ) -> None:
        """Count the steps of all chains of a batch; `output` are the target's output layer's rows
        of the draft vocabulary."""
        kinds = torch.stack([batch.temperatures == 0, batch.temperatures == 1])
        alive = batch.normaliser.new_ones(batch.last.shape[:2])
        survival = alive.new_zeros(*alive.shape, self.alive.shape[1])
        for number, step in enumerate(steps):
            accepted, follows = _judge(head, batch, step, output)
            before = alive[step.texts, step.starts]
            for kind, texts in enumerate(kinds):
                chosen = texts[step.texts]
                self.alive[kind, number] += before[chosen].sum().cpu()
                self.accepted[kind, number] += (before * accepted)[chosen].sum().cpu()
            alive[step.texts, step.starts] = before * follows
            survival[step.texts, step.starts, number] = before * follows
        taken = rounds(survival.double(), batch.lengths)
        for kind, texts in enumerate(kinds):
            self.tokens[kind] += batch.lengths[texts].sum().cpu()
            self.rounds[kind] += taken[texts].sum().cpu()

    def result(self) -> Acceptance:
        """By position, of the texts so far."""
        greedy, sampled = (self.accepted / self.alive.clamp(min=1e-9)).tolist()
        counted = self.alive.sum(1) > 0
        tokens = (self.tokens / self.rounds.clamp(min=1e-9)).tolist()
        return Acceptance(
            greedy=tuple(greedy) if counted[0] else (),
            sampled=tuple(sampled) if counted[1] else (),
            greedy_tokens=tokens[0] if counted[0] else None,
            sampled_tokens=tokens[1] if counted[1] else None,
        )


def _judge(
    head: EagleHead, batch: TextBatch, step: UnrolledStep, output: Tensor
) -> tuple[Tensor, Tensor]:
    """The probability that the candidate after each row is accepted, and that the text's own token
    is, (rows,) each."""
    accepted, follows = batch.normaliser.new_empty(2, len(step.texts))
    numbers = head.proposable.new_full((head.settings.vocab_size,), -1)
    numbers[head.proposable] = torch.arange(len(head.proposable), device=numbers.device)
    places = batch.prompts[step.texts] + step.positions + 1
    following = numbers[batch.tokens[step.texts, places]]
    greedy = batch.temperatures[step.texts] == 0
    for rows in parts(len(step.texts), output.device):
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
