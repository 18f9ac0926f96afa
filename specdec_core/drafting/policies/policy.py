"""What a length policy sees and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specdec_core.tokens.sampling import to_host


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
        pick = lambda values: [values[place] for place in chosen]  # noqa: E731
        names = pick(self.slots), pick(self.tokens), pick(self.positions)
        places = chosen if self._places is None else pick(self._places)
        part = Signals(*names, *self._states, places)
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
        return self._own(self._states[2])

    def _own(self, states: Tensor | None) -> Tensor | None:
        places = self._places
        if states is None or places is None:
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
        given = self._own(self._states[1])
        return self._scores.softmax(dim=-1) if given is None else given

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
        return torch.special.entr(self.probs).sum(dim=-1)


_MEASURED = {
    "top_probability": Signals._top_probability,
    "probability": Signals._probability,
    "entropy": Signals._entropy,
}


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """What became of a round's candidates, which follow each other."""

    drafted: int
    accepted: int  # the first ones
    draft_calls: int  # forwards of the draft model that the round took


class LengthPolicy:
    """Answers for all slots at once, and may learn from a round's outcome."""

    needs_hidden = False
    # Which values of the signals `go_on` reads: they come from the device with the tokens.
    reads: Sequence[str] = ()
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

    def observe(self, slot: int, outcome: PolicyOutcome) -> None:
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
