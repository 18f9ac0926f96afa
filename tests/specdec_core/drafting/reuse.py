"""What the tests of drafters that use tokens again have in common."""

from __future__ import annotations

from specdec_core.config import AUTOREGRESSIVE, DrafterSettings, Sampling
from specdec_core.engine import Engine, Request
from specdec_core.models.pair import Pair
from specdec_core.tokens.acceptance import VerifierOutput, rule_of
from specdec_core.tokens.sampling import draw
from specdec_core.tokens.statistics import Generation, TokenOrigin
from specdec_core.tokens.token_tree import ROOT
from specdec_core.tokens.verification import Verdict
from tests.specdec_core.fits import fit

__all__ = ["fit"]

_TEXTS = [
    "def add(a, b):\n    return a + b\n\ndef add(a, b):\n",
    "x = 1\ny = 2\nx = 1\ny = 2\nx = 1\n",
    "import",
    "for i in range(10):\n    print(i)\n" * 2,
    "0",
]


def generate(
    pair: Pair,
    drafter: DrafterSettings | None,
    slots: int = 1,
    sampling: Sampling | None = None,
) -> list[Generation]:
    """Continuations of texts of different lengths that repeat themselves and that do not."""
    configuration = AUTOREGRESSIVE.model_copy(
        update={"drafter": drafter, "sampling": sampling or Sampling()}
    )
    engine = Engine(pair, configuration, slots)
    return engine.generate(
        [
            Request(str(i), engine.encode(text), 30 + 5 * i, seed=i, ignore_eos=True)
            for i, text in enumerate(_TEXTS)
        ]
    )


_expected: dict[tuple[int, Sampling], list[list[int]]] = {}


def same_as_the_target_alone(pair: Pair, drafter: DrafterSettings, sampling: Sampling) -> bool:
    """Whether three slots, with requests coming and going, write what the target does alone."""
    key = id(pair), sampling
    if key not in _expected:
        _expected[key] = [g.tokens for g in generate(pair, None, 1, sampling)]
    return [g.tokens for g in generate(pair, drafter, 3, sampling)] == _expected[key]


def from_cache(generations: list[Generation]) -> int:
    """Tokens of the output that were cached phrases."""
    return sum(origin is TokenOrigin.CACHE for g in generations for origin in g.origins)


REJECTION = type(rule_of(Sampling(temperature=1.0)))


class AnyPossibleGuess(REJECTION):
    """A wrong rule for what a draft model draws: a guess wherever it is possible at all."""

    def verify(self, reading: VerifierOutput, choices: list[int]) -> Verdict:
        tree, _, probs, random, _ = reading
        guesses = tree.children().get(ROOT, [])
        possible = [node for node in guesses if probs[0, tree.tokens[node]] > 0]
        [own] = draw(probs[:1], [random.uniform()])
        return Verdict([], tree.tokens[possible[0]] if possible else own, corrected=False)
