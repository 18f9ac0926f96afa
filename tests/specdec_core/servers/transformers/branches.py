"""All outcomes of a program that draws at random, with their probabilities."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


class Branches:
    """Runs a program once for every sequence of outcomes of its draws."""

    def __init__(self) -> None:
        self._todo: list[list[int]] = [[]]
        self._script: list[int] = []
        self._taken: list[int] = []
        self._weight = 1.0

    def choose(self, weights: Sequence[float]) -> int:
        """The outcome of a draw in this run."""
        place = len(self._taken)
        possible = [n for n, weight in enumerate(weights) if weight > 0]
        if place < len(self._script):
            outcome = self._script[place]
        else:
            outcome, *others = possible
            self._todo += [[*self._taken, other] for other in others]
        self._weight *= weights[outcome]
        self._taken.append(outcome)
        return outcome

    def run(self, program: Callable[[], T]) -> Iterator[tuple[float, T]]:
        """What every run returns, and its probability."""
        while self._todo:
            self._script, self._taken, self._weight = self._todo.pop(), [], 1.0
            result = program()
            yield self._weight, result
