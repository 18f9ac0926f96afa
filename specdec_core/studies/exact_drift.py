"""The distribution of what target-initialised trees write on the toy pair, written down in full.

Nothing is sampled: every way in which the target's first tokens, the draft's candidates and the
verdicts on them can turn out is enumerated with its probability. That says exactly how far a width
drifts (improved MCSD, §3.1), that width 1 does not, and what the engine's samples must look like.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import torch

from specdec_core.config import Sampling
from specdec_core.drafting.target_tree.settings import TargetTreeSettings
from specdec_core.models.pair import Pair
from specdec_core.studies.toy_pair import PROMPT, VOCABULARY
from specdec_core.tokens.sampling import warp

Text = tuple[int, ...]


def written_distribution(
    pair: Pair, drafter: TargetTreeSettings, sampling: Sampling, length: int
) -> np.ndarray:
    """The probability (VOCABULARY^length,) with which the engine writes each continuation of
    PROMPT, in the order of :func:`specdec_core.studies.toy_pair.exact_distribution`.

    For rejection sampling; it takes seconds up to a length of 4.
    """
    if sampling.greedy or sampling.coupling != "rejection":
        raise ValueError("only rejection sampling is enumerated")
    target = _next_tokens(pair.target, sampling, length)
    draft = _next_tokens(pair.drafts[pair.draft_name(drafter.draft)], sampling, length)
    law = _Law(target, draft, drafter, length)
    return law.written((), target[()])


@torch.inference_mode()
def _next_tokens(model: torch.nn.Module, sampling: Sampling, length: int) -> dict[Text, np.ndarray]:
    """The distribution (VOCABULARY,) behind PROMPT and every text of fewer than `length` tokens."""
    found: dict[Text, np.ndarray] = {}
    for size in range(length):
        texts = list(product(range(VOCABULARY), repeat=size))
        logits = model(torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, -1]
        probs = warp(logits, sampling).double().numpy()
        found |= zip(texts, probs / probs.sum(axis=1, keepdims=True), strict=True)
    return found


class _Law:
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
        self.judged = cache(self._judged)

    def written(self, text: Text, own: np.ndarray) -> np.ndarray:
        """The probability (VOCABULARY^missing,) of what completes `text`, where the target draws
        the next tree's first tokens from `own` (VOCABULARY,)."""
        missing = self.length - len(text)
        if missing == 1:
            return own  # nothing can follow, and of equals the first wins
        levels = min(missing - 1, len(self.counts))
        possible = np.flatnonzero(own)
        below = {int(s): self.outcomes((*text, int(s)), 0, levels) for s in possible}
        wins = self.wins(own, below, levels)
        found = np.zeros((VOCABULARY,) * missing)
        for start, outcomes in below.items():
            for path, left, probability in outcomes:
                weight = wins[start, len(path)] * probability
                if not weight:
                    continue
                place = (start, *path)
                if len(place) == missing:
                    found[place] += weight
                else:
                    rest = self.written((*text, *place), left)
                    found[place] += weight * rest.reshape((VOCABULARY,) * (missing - len(place)))
        return found.ravel()

    def wins(
        self,
        own: np.ndarray,
        below: dict[int, list[tuple[Text, np.ndarray, float]]],
        levels: int,
    ) -> np.ndarray:
        """Entry (s, n): the probability that token s is among the first tokens and its accepted
        path wins, given that it is n nodes long: longer than those before it, as long as any
        behind it."""
        lengths = np.zeros((VOCABULARY, levels + 2))  # shifted by one: [s, 0] is "shorter than 0"
        for start, outcomes in below.items():
            for path, _, probability in outcomes:
                lengths[start, len(path) + 1] += probability
        up_to = lengths.cumsum(axis=1)
        tuples = _draws(own, self.width, replacement=False)
        found = np.zeros((VOCABULARY, levels + 1))
        for starts, probability in tuples:
            for n in range(levels + 1):
                for i, start in enumerate(starts):
                    before = np.prod([up_to[s, n] for s in starts[:i]])
                    behind = np.prod([up_to[s, n + 1] for s in starts[i + 1 :]])
                    found[start, n] += probability * before * behind
        return found

    def outcomes(self, text: Text, level: int, levels: int) -> list[tuple[Text, np.ndarray, float]]:
        """What may be accepted behind `text`: the path, the distribution that the target draws
        from behind it, and the probability."""
        if level == levels:
            # What ends a text needs no distribution to go on from.
            return [((), self.target.get(text, np.zeros(VOCABULARY)), 1.0)]
        accepted, rejected = self.judged(text, level)
        found: list[tuple[Text, np.ndarray, float]] = [((), *own) for own in rejected]
        for token in np.flatnonzero(accepted):
            for path, left, probability in self.outcomes((*text, int(token)), level + 1, levels):
                found.append(((int(token), *path), left, float(accepted[token]) * probability))
        return found

    def _judged(self, text: Text, level: int) -> tuple[np.ndarray, list[tuple[np.ndarray, float]]]:
        """Of the candidates behind `text`: the probability (VOCABULARY,) that each is accepted,
        and what may be left of the target's distribution when none is."""
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
    """What `count` draws in a row may be, fewer where no more are possible, and how probably."""
    found: list[tuple[Text, float, np.ndarray]] = [((), 1.0, weights)]
    for _ in range(count):
        longer: list[tuple[Text, float, np.ndarray]] = []
        for tokens, probability, left in found:
            for token in np.flatnonzero(left):
                after = left if replacement else _without(left, int(token))
                longer.append(((*tokens, int(token)), probability * left[token], after))
            if not left.any():
                longer.append((tokens, probability, left))
        found = longer
    return [(tokens, float(probability)) for tokens, probability, _ in found]


def _without(weights: np.ndarray, token: int) -> np.ndarray:
    """`weights` without a token, normalised; all zero when it was the only one."""
    left = weights.copy()
    left[token] = 0
    return left / left.sum() if left.any() else left


def exact_divergence(written: np.ndarray, target: np.ndarray) -> tuple[float, float]:
    """KL(written ‖ target) in nats and the total variation, of distributions (texts,)."""
    some = written > 0
    kl = float((written[some] * np.log(written[some] / target[some])).sum())
    return kl, float(np.abs(written - target).sum() / 2)
