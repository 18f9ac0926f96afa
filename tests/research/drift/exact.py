"""The exact distribution of the texts of target-initialised trees on the toy pair.

Nothing is sampled: every combination of the target's first tokens, the draft's candidates and their
verification is enumerated with its probability. That gives the exact drift of a width (improved
MCSD, §3.1), which is none for width 1, and the distribution that the engine's samples must have.
"""

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch

from specdec_core.config import Sampling
from specdec_core.drafting.target_started.settings import TargetTreeSettings
from specdec_core.models.pair import Pair
from specdec_core.tokens.sampling import warp
from tests.toy_pair import PROMPT, VOCABULARY

Text = tuple[int, ...]
# An accepted path, the distribution (VOCABULARY,) that the target draws from after it, and the
# probability.
Outcome = tuple[Text, np.ndarray, float]


def written_distribution(
    pair: Pair, drafter: TargetTreeSettings, sampling: Sampling, length: int
) -> np.ndarray:
    """The engine's probability (VOCABULARY^length,) of each continuation of PROMPT, in the order of
    :func:`tests.toy_pair.exact_distribution`.

    For rejection sampling; takes seconds up to a length of 4.
    """
    if sampling.greedy or sampling.coupling != "rejection":
        raise ValueError("only rejection sampling is enumerated")
    target = _next_tokens(pair.target, sampling, length)
    draft = _next_tokens(pair.drafts[pair.draft_name(drafter.draft)], sampling, length)
    return _Enumeration(target, draft, drafter, length).written((), target[()])


@torch.inference_mode()
def _next_tokens(model: torch.nn.Module, sampling: Sampling, length: int) -> dict[Text, np.ndarray]:
    """The distribution (VOCABULARY,) after PROMPT and every text of fewer than `length` tokens."""
    distributions: dict[Text, np.ndarray] = {}
    for size in range(length):
        texts = list(product(range(VOCABULARY), repeat=size))
        logits = model(torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, -1]
        probs = warp(logits, sampling).double().numpy()
        distributions |= zip(texts, probs / probs.sum(axis=1, keepdims=True), strict=True)
    return distributions


class _Enumeration:
    """Enumerates rounds; `target` and `draft` are distributions (VOCABULARY,) by text."""

    def __init__(
        self,
        target: dict[Text, np.ndarray],
        draft: dict[Text, np.ndarray],
        drafter: TargetTreeSettings,
        length: int,
    ) -> None:
        self.target, self.draft, self.length = target, draft, length
        self.width, *self.counts = drafter.branching
        self.replacement = drafter.replacement
        self.verified = cache(self._verified)

    def written(self, text: Text, first: np.ndarray) -> np.ndarray:
        """The probability (VOCABULARY^missing,) of each completion of `text`, where the target
        draws the next tree's first tokens from `first` (VOCABULARY,)."""
        missing = self.length - len(text)
        if missing == 1:
            return first  # nothing can follow, and the first of equal paths wins
        levels = min(missing - 1, len(self.counts))
        outcomes = {
            int(start): self.outcomes((*text, int(start)), 0, levels)
            for start in np.flatnonzero(first)
        }
        wins = self.wins(first, outcomes, levels)
        probabilities = np.zeros((VOCABULARY,) * missing)
        for start, below in outcomes.items():
            for path, left, probability in below:
                weight = wins[start, len(path)] * probability
                if not weight:
                    continue
                place = (start, *path)
                rest: Any = 1.0
                if len(place) < missing:
                    rest = self.written((*text, *place), left)
                    rest = rest.reshape((VOCABULARY,) * (missing - len(place)))
                probabilities[place] += weight * rest
        return probabilities.ravel()

    def wins(
        self, first: np.ndarray, outcomes: dict[int, list[Outcome]], levels: int
    ) -> np.ndarray:
        """Entry (s, n): the probability that token s is among the first tokens and its accepted
        path wins, given that it is n nodes long: longer than those before it, and at least as long
        as those after it."""
        lengths = np.zeros((VOCABULARY, levels + 2))  # shifted by one: [s, 0] is "shorter than 0"
        for start, below in outcomes.items():
            for path, _, probability in below:
                lengths[start, len(path) + 1] += probability
        up_to = lengths.cumsum(axis=1)
        wins = np.zeros((VOCABULARY, levels + 1))
        for starts, probability in _draws(first, self.width, replacement=False):
            for n in range(levels + 1):
                for i, start in enumerate(starts):
                    before = np.prod([up_to[s, n] for s in starts[:i]])
                    after = np.prod([up_to[s, n + 1] for s in starts[i + 1 :]])
                    wins[start, n] += probability * before * after
        return wins

    def outcomes(self, text: Text, level: int, levels: int) -> list[Outcome]:
        """The paths that may be accepted after `text`."""
        if level == levels:
            # A complete text needs no distribution after it.
            return [((), self.target.get(text, np.zeros(VOCABULARY)), 1.0)]
        accepted, rejected = self.verified(text, level)
        outcomes: list[Outcome] = [((), left, probability) for left, probability in rejected]
        for token in np.flatnonzero(accepted):
            for path, left, probability in self.outcomes((*text, int(token)), level + 1, levels):
                outcomes.append(((int(token), *path), left, float(accepted[token]) * probability))
        return outcomes

    def _verified(
        self, text: Text, level: int
    ) -> tuple[np.ndarray, list[tuple[np.ndarray, float]]]:
        """Of the candidates after `text`: the probability (VOCABULARY,) that each is accepted, and
        the target's remaining distributions when none is, with their probabilities."""
        accepted, rejected = np.zeros(VOCABULARY), []
        count = self.counts[level]
        for tokens, probability in _draws(self.draft[text], count, self.replacement):
            left, q = self.target[text], self.draft[text]
            for token in tokens:
                taken = min(1.0, left[token] / q[token])
                accepted[token] += probability * taken
                probability *= 1 - taken
                rest = np.maximum(left - q, 0)
                left = rest / rest.sum() if rest.sum() > 0 else left
                if not self.replacement:
                    q = _without(q, int(token))
            if probability > 0:
                rejected.append((left, probability))
        return accepted, rejected


def _draws(
    weights: np.ndarray, count: int, replacement: bool
) -> list[tuple[tuple[int, ...], float]]:
    """The possible results of `count` draws in a row, fewer where no more are possible, with their
    probabilities."""
    draws: list[tuple[Text, float, np.ndarray]] = [((), 1.0, weights)]
    for _ in range(count):
        longer: list[tuple[Text, float, np.ndarray]] = []
        for tokens, probability, left in draws:
            for token in np.flatnonzero(left):
                after = left if replacement else _without(left, int(token))
                longer.append(((*tokens, int(token)), probability * left[token], after))
            if not left.any():
                longer.append((tokens, probability, left))
        draws = longer
    return [(tokens, float(probability)) for tokens, probability, _ in draws]


def _without(weights: np.ndarray, token: int) -> np.ndarray:
    """`weights` without a token, normalised; all zero when it was the only one."""
    left = weights.copy()
    left[token] = 0
    return left / left.sum() if left.any() else left


def exact_divergence(written: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """KL(written ‖ target) in nats and the total variation, of distributions (texts,)."""
    possible = written > 0
    kl = float((written[possible] * np.log(written[possible] / target[possible])).sum())
    return kl, float(np.abs(written - target).sum() / 2)
