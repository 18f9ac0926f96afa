"""What a length policy sees and answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class Signals:
    """What is known when one candidate token has been drafted for each of n slots.

    `slots` (n,) says whose, `tokens` (n,) which, `positions` (n,) how many candidates the round has
    with it. `logits` (n, vocabulary) and, under sampling, `probs` are what the tokens were drawn
    from. `hidden` (n, dimension), for policies that ask for it, is what the draft's output layer
    read to make them: the state of the token before. Whatever else is here is computed only when a
    policy asks for it.
    """

    def __init__(
        self,
        slots: Sequence[int],
        tokens: Sequence[int],
        positions: Sequence[int],
        logits: Tensor,
        probs: Tensor | None,
        hidden: Tensor | None = None,
    ) -> None:
        self.slots, self.tokens, self.positions = slots, tokens, positions
        self.logits, self.hidden = logits, hidden
        self._probs = probs

    def only(self, places: Sequence[int]) -> Signals:
        """What is known of the slots at `places`."""
        chosen = list(places)
        pick = lambda values: [values[place] for place in chosen]  # noqa: E731
        return Signals(
            pick(self.slots),
            pick(self.tokens),
            pick(self.positions),
            self.logits[chosen],
            None if self._probs is None else self._probs[chosen],
            None if self.hidden is None else self.hidden[chosen],
        )

    @cached_property
    def probs(self) -> Tensor:
        """The draft distribution q (n, vocabulary); at temperature 1 when decoding is greedy."""
        return self.logits.float().softmax(dim=-1) if self._probs is None else self._probs

    @cached_property
    def top_probability(self) -> list[float]:
        """The draft's confidence (n,): the largest probability of q."""
        return self.probs.amax(dim=-1).tolist()

    @cached_property
    def probability(self) -> list[float]:
        """q(y) (n,) of the drafted tokens y."""
        drawn = torch.tensor(self.tokens, device=self.probs.device)[:, None]
        return self.probs.gather(1, drawn)[:, 0].tolist()

    @cached_property
    def entropy(self) -> list[float]:
        """Entropies (n,) of q in nats."""
        if self._probs is None:
            # Three times as fast as entr, whose care for zeros is not needed here.
            log_probs = self.logits.float().log_softmax(dim=-1)
            return (-(self.probs * log_probs).sum(dim=-1)).tolist()
        return torch.special.entr(self.probs).sum(dim=-1).tolist()

    def top_probabilities(self, k: int) -> Tensor:
        """The k largest probabilities (n, k), falling; 0 beyond the vocabulary."""
        known = min(k, self.probs.shape[-1])
        found = self.probs.topk(known, dim=-1).values
        return found if known == k else torch.nn.functional.pad(found, (0, k - known))


def draft_distributions(logits: Tensor, probs: Sequence[Tensor | None]) -> Tensor | None:
    """What the rows of `logits` (n, vocabulary) are sampled from (n, vocabulary): `probs`, at
    temperature 1 where that is None because the row is greedy. None where all are: :class:`Signals`
    then makes them if a policy asks."""
    if all(q is None for q in probs):
        return None
    pairs = zip(logits, probs, strict=True)
    return torch.stack([own.float().softmax(dim=-1) if q is None else q for own, q in pairs])


class LengthPolicy:
    """Answers for all slots at once, and may learn from a round's outcome."""

    needs_hidden = False
    # Learns from its candidates: `go_on` sees each of them, also where nobody asks for the answer
    # any more because the round is at its limit or the text at its end.
    learns = False
    # May want no candidates for many rounds: until it does, the draft need not read the text.
    rests = False

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def limit(self, slot: int, batch: int = 1) -> int:
        """Candidate tokens at most in the coming round of `slot`, which `batch` requests share;
        asked once, as it begins."""
        return self.settings.max_tokens

    def go_on(self, signals: Signals) -> Sequence[bool]:
        """For each slot, whether to draft another candidate."""
        return [True] * len(signals.slots)

    def observe(self, slot: int, drafted: int, accepted: int) -> None:
        """A round of `slot` was verified, and its request goes on."""

    def reset(self, slot: int) -> None:
        """`slot` begins a new request."""


class Rule(LengthPolicy):
    """A policy that decides from the candidates of the round alone.

    Every candidate has a value; the round stops behind the first one whose value, or with
    `cumulative` the product of the round's values so far, `stops`. No memory reaches beyond the
    round, so that a replay can evaluate all rounds of a trace at once.
    """

    cumulative = False
    min_tokens = 1
    # A candidate's value is the one of the candidate before, which is known only now.
    lagging = False

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._products: dict[int, float] = {}

    def values(self, signals: Signals) -> Sequence[float]:
        """The value (n,) of each drafted candidate."""
        raise NotImplementedError

    def stops(self, value: Any) -> Any:
        """Whether to stop at a value (a number or an array of any shape)."""
        raise NotImplementedError

    def limit(self, slot: int, batch: int = 1) -> int:
        self._products[slot] = 1.0
        return super().limit(slot, batch)

    def go_on(self, signals: Signals) -> Sequence[bool]:
        answers = []
        values = self.values(signals)
        for slot, position, value in zip(signals.slots, signals.positions, values, strict=True):
            if self.lagging and position == 1:
                value = 1.0
            if self.cumulative:
                value = self._products[slot] = self._products[slot] * value
            answers.append(position < self.min_tokens or not self.stops(value))
        return answers
