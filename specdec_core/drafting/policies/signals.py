"""What a length policy sees of the candidates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from specdec_core.tokens.sampling import to_host

T = TypeVar("T")


class Signals:
    """What is known when one candidate token has been drafted for each of n slots.

    `slots` (n,) says whose, `tokens` (n,) which, `positions` (n,) how many candidates the round has
    with it. `logits` (n, vocabulary) and, under sampling, `probs` are what the tokens were drawn
    from. `hidden` (n, dimension), for policies that ask for it, is what the draft's output layer
    read to make them: the state of the token before. Whatever else is here is computed only when a
    policy asks for it.

    Tokens that the host does not know yet are a tensor (n,) until they are fetched. With `places`
    (n,), these rows of `logits`, `probs` and `hidden` are meant.
    """

    tokens: Sequence[int]

    def __init__(
        self,
        slots: Sequence[int],
        tokens: Sequence[int] | Tensor,
        positions: Sequence[int],
        logits: Tensor,
        probs: Tensor | None,
        hidden: Tensor | None = None,
        places: list[int] | None = None,
    ) -> None:
        self.slots, self.positions = slots, positions
        self._states, self._places = (logits, probs, hidden), places
        self._drawn: Tensor | None = None
        if isinstance(tokens, Tensor):
            self._drawn = tokens
        else:
            self.tokens = tokens

    def only(self, places: Sequence[int]) -> Signals:
        """What is known of the slots at `places`."""
        chosen = list(places)
        if chosen == list(range(len(self.slots))):
            return self

        def pick(values: Sequence[T]) -> list[T]:
            return [values[place] for place in chosen]

        names = pick(self.slots), pick(self.tokens), pick(self.positions)
        part = Signals(
            *names, *self._states, chosen if self._places is None else pick(self._places)
        )
        known = {name: pick(self.__dict__[name]) for name in _MEASURED if name in self.__dict__}
        part.__dict__.update(known)
        return part

    def fetch(self, names: Sequence[str]) -> None:
        """Bring the tokens and the values `names` to the host, with one copy from the device."""
        measured = [self.measure(name) for name in names]
        if self._drawn is not None:
            tokens, *values = to_host(self._drawn, *measured)
            self.tokens, self._drawn = list(map(int, tokens)), None
        else:
            values = to_host(*measured) if measured else []
        self.__dict__.update(zip(names, values, strict=True))

    def measure(self, name: str) -> Tensor:
        """The values (n,) `top_probability`, `probability` or `entropy` where the logits are."""
        return _MEASURED[name](self)

    @cached_property
    def logits(self) -> Tensor:
        return self._own(self._states[0])

    @cached_property
    def hidden(self) -> Tensor | None:
        states = self._states[2]
        return None if states is None else self._own(states)

    def _own(self, states: Tensor) -> Tensor:
        places = self._places
        if places is None:
            return states
        first, count = places[0], len(places)
        consecutive = places == list(range(first, first + count))
        return states[first : first + count] if consecutive else states[places]

    @cached_property
    def _scores(self) -> Tensor:
        return self.logits.float()

    @cached_property
    def probs(self) -> Tensor:
        """The draft distribution q (n, vocabulary); at temperature 1 when decoding is greedy."""
        given = self._states[1]
        return self._scores.softmax(dim=-1) if given is None else self._own(given)

    @cached_property
    def top_probability(self) -> list[float]:
        """The draft's confidence (n,): the largest probability of q."""
        return self.measure("top_probability").tolist()

    @cached_property
    def probability(self) -> list[float]:
        """q(y) (n,) of the drafted tokens y."""
        return self.measure("probability").tolist()

    @cached_property
    def entropy(self) -> list[float]:
        """Entropies (n,) of q in nats."""
        return self.measure("entropy").tolist()

    def top_probabilities(self, k: int) -> Tensor:
        """The k largest probabilities (n, k), falling; 0 beyond the vocabulary."""
        known = min(k, self.probs.shape[-1])
        found = self.probs.topk(known, dim=-1).values
        return found if known == k else torch.nn.functional.pad(found, (0, k - known))

    def _top_probability(self) -> Tensor:
        return self.probs.amax(dim=-1)

    def _probability(self) -> Tensor:
        drawn = self._drawn
        if drawn is None:
            drawn = torch.tensor(self.tokens, device=self.probs.device)
        return self.probs.gather(1, drawn[:, None])[:, 0]

    def _entropy(self) -> Tensor:
        if self._states[1] is None:
            # Three times as fast as entr, whose care for zeros is not needed here.
            return (self.probs * self._scores.log_softmax(dim=-1)).sum(dim=-1).neg()
        terms: Tensor = torch.special.entr(self.probs)
        return terms.sum(dim=-1)


_MEASURED = {
    "top_probability": Signals._top_probability,
    "probability": Signals._probability,
    "entropy": Signals._entropy,
}
