"""The signals that a length policy decides by."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from specdec_core.models.runner import Output
from specdec_core.tokens.sampling import to_host

T = TypeVar("T")
MEASURED = ("top_probability", "probability", "entropy")  # what is copied with the tokens
_LEAST = -1e4  # the logarithm of no probability, as a number


class Signals:
    """Signals of one candidate token for each of n slots.

    `slots` (n,), `tokens` (n,), and `positions` (n,), the candidate's number in its round from 1
    on. `calls` (n,) are the forwards of the draft model that the round took so far, as many as
    candidates where each took one; `free` (n,) tells whether the next candidate takes none, because
    a guess added it with this one. The tokens were drawn from the logits (n, vocabulary) that are
    the `source` or, under sampling, from `probs`. `hidden` (n, dimension), where a policy needs it,
    is the input of the draft's output layer: the state of the token before. Everything else is
    computed when a policy reads it.

    Tokens that are still on the device are a tensor (n,) until they are fetched. With `places`
    (n,), row i is the row `places[i]` of `source`, `probs` and `hidden`. A forward's output may be
    the `source`: its logits are read when a policy needs them, and without `probs` all tokens are
    its most likely ones, whose probabilities it may know.
    """

    tokens: Sequence[int]

    def __init__(
        self,
        slots: Sequence[int],
        tokens: Sequence[int] | Tensor,
        positions: Sequence[int],
        source: Tensor | Output,
        probs: Tensor | None,
        hidden: Tensor | None = None,
        places: list[int] | None = None,
        calls: Sequence[int] | None = None,
        free: Sequence[bool] | None = None,
    ) -> None:
        self.slots, self.positions = slots, positions
        self.calls = positions if calls is None else calls
        self.free = [False] * len(slots) if free is None else free
        self._source, self._states, self._places = source, (probs, hidden), places
        self._drawn: Tensor | None = None
        if isinstance(tokens, Tensor):
            self._drawn = tokens
        else:
            self.tokens = tokens

    def only(self, places: Sequence[int]) -> Signals:
        """The signals at `places` alone."""
        chosen = list(places)
        if chosen == list(range(len(self.slots))):
            return self

        def pick(values: Sequence[T]) -> list[T]:
            return [values[place] for place in chosen]

        names = pick(self.slots), pick(self.tokens), pick(self.positions)
        places = chosen if self._places is None else pick(self._places)
        part = Signals(
            *names, self._source, *self._states, places, pick(self.calls), pick(self.free)
        )
        known = {name: pick(self.__dict__[name]) for name in MEASURED if name in self.__dict__}
        part.__dict__.update(known)
        return part

    def fetch(self, names: Sequence[str]) -> None:
        """Copy the tokens and the values `names` to the host, with one copy from the device."""
        measured = [self.measure(name) for name in names]
        if self._drawn is not None:
            tokens, *values = to_host(self._drawn, *measured)
            self.tokens, self._drawn = list(map(int, tokens)), None
        else:
            values = to_host(*measured) if measured else []
        self.__dict__.update(zip(names, values, strict=True))

    def measure(self, name: str) -> Tensor:
        """The values (n,) `top_probability`, `probability` or `entropy`, on the logits' device."""
        if name == "entropy":
            if self._states[0] is None:
                # Three times as fast as entr. Tokens that a grammar excludes have no logarithm.
                logarithms = self._scores.log_softmax(dim=-1).clamp_(min=_LEAST)
                return (self.probs * logarithms).sum(dim=-1).neg()
            terms: Tensor = torch.special.entr(self.probs)
            return terms.sum(dim=-1)
        if self._states[0] is None and not isinstance(self._source, Tensor):
            return self._rows(self._source.confidence)
        if name == "top_probability":
            return self.probs.amax(dim=-1)
        drawn = self._drawn
        if drawn is None:
            drawn = torch.tensor(self.tokens, device=self.probs.device)
        return self.probs.gather(1, drawn[:, None])[:, 0]

    @cached_property
    def logits(self) -> Tensor:
        source = self._source
        return self._rows(source if isinstance(source, Tensor) else source.logits)

    @cached_property
    def hidden(self) -> Tensor | None:
        states = self._states[1]
        return None if states is None else self._rows(states)

    def _rows(self, states: Tensor) -> Tensor:
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
        given = self._states[0]
        return self._scores.softmax(dim=-1) if given is None else self._rows(given)

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
        top = self.probs.topk(known, dim=-1).values
        return top if known == k else torch.nn.functional.pad(top, (0, k - known))
