"""The rule that accepts a request's candidates, and how candidates are drawn for it.

=========  ==============================  =========================  =============================
rule       a model's token at a position   siblings in a draft tree   a candidate is accepted
=========  ==============================  =========================  =============================
greedy     argmax of the logits            the most likely tokens     if it is the target's token
coupled    argmax p / E                    the largest q / E          if it is the target's token
rejection  drawn from p                    drawn from q               with probability min(1, p/q)
=========  ==============================  =========================  =============================

E is the request's noise at the position (:mod:`specdec_core.tokens.coupling`). The verdicts
themselves are made in :mod:`specdec_core.tokens.verification`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_core.config import Sampling
from specdec_core.tokens.coupling import scores
from specdec_core.tokens.sampling import RandomStream, distributions, draw, draw_siblings, quantile
from specdec_core.tokens.token_tree import ROOT, TokenTree
from specdec_core.tokens.verification import Verdict, verify_greedy, verify_sampled

# A token and the distribution (vocabulary,) that it was drawn from, where the rule needs that.
Candidate = tuple[int, Tensor | None]


def rule_of(sampling: Sampling) -> AcceptanceRule:
    """The rule for requests that sample like this."""
    return _GREEDY if sampling.greedy else _SAMPLED[sampling.coupling]


@dataclass
class Places:
    """n positions, in sequences of several requests, at which a model chooses the next token.

    Args:
        samplings: (n,) of the position's request.
        streams: (n,) the randomness of that request.
        positions: (n,) in the request's text.
        read: gives the model's logits (n, vocabulary); called only where they are needed.
        likely: gives the most likely tokens (n,); called only where decoding is greedy.
    """

    samplings: Sequence[Sampling]
    streams: Sequence[RandomStream]
    positions: Sequence[int]
    read: Callable[[], Tensor]
    likely: Callable[[], Tensor]

    @cached_property
    def logits(self) -> Tensor:
        """The model's logits (n, vocabulary)."""
        return self.read()

    @cached_property
    def probs(self) -> Tensor | None:
        """The distributions (n, vocabulary) to draw from, at temperature 1 where decoding is
        greedy; None where it is greedy everywhere."""
        if all(sampling.greedy for sampling in self.samplings):
            return None
        return distributions(self.logits, self.samplings)

    @property
    def sampled(self) -> Tensor:
        """`probs` where decoding is not greedy everywhere."""
        assert self.probs is not None
        return self.probs

    def draw(self) -> Tensor:
        """The tokens (n,) that the model chooses."""
        parts = self._by_rule()
        if len(parts) == 1:
            return parts[0][0].draw(self)
        drawn = torch.empty(len(self.positions), dtype=torch.long, device=self.logits.device)
        for rule, rows, part in parts:
            drawn[rows] = rule.draw(part)
        return drawn

    def carried(self) -> list[Tensor | None]:
        """The distribution (vocabulary,) that each drawn token carries as a candidate, if any."""
        if self.probs is None:
            return [None] * len(self.positions)
        rows = zip(self.samplings, self.probs.unbind(), strict=True)
        return [q if rule_of(sampling).carries_q else None for sampling, q in rows]

    def siblings(self, counts: Sequence[int], replacement: bool = False) -> list[list[Candidate]]:
        """At most `counts[i]` candidates for place i, in the order drawn; fewer where no other
        token has any probability. With `replacement` a token may be drawn again."""
        siblings: list[list[Candidate]] = [[] for _ in counts]
        for rule, rows, part in self._by_rule():
            drawn = rule.siblings(part, [counts[n] for n in rows], replacement)
            for n, candidates in zip(rows, drawn, strict=True):
                siblings[n] = candidates
        return siblings

    def confidences(self) -> Tensor:
        """How likely the model is to choose each token (n, vocabulary): the token's probability,
        or where sampling is coupled p / E, normalised."""
        if self.probs is None:
            return self.logits.float().softmax(dim=-1)
        parts = self._by_rule()
        if len(parts) == 1:
            return parts[0][0].confidences(self)
        confidences = torch.empty_like(self.probs)
        for rule, rows, part in parts:
            confidences[rows] = rule.confidences(part)
        return confidences

    def _by_rule(self) -> list[tuple[AcceptanceRule, list[int], Places]]:
        """The rules in use, the rows that each applies to, and these rows' places."""
        rules: dict[AcceptanceRule, list[int]] = {}
        for n, sampling in enumerate(self.samplings):
            rules.setdefault(rule_of(sampling), []).append(n)
        if len(rules) == 1:
            return [(rule, rows, self) for rule, rows in rules.items()]
        return [(rule, rows, self._part(rows)) for rule, rows in rules.items()]

    def _part(self, rows: list[int]) -> Places:
        part = Places(
            [self.samplings[n] for n in rows],
            [self.streams[n] for n in rows],
            [self.positions[n] for n in rows],
            lambda: self.logits[rows],
            lambda: self.likely()[rows],
        )
        part.probs = None if self.probs is None else self.probs[rows]
        return part


class VerifierOutput(NamedTuple):
    """A verifier's output for a tree that begins at the position `start` of a request's text: the
    most `likely` tokens and the distributions `probs` (1 + nodes, vocabulary) after the text, [0],
    and after each node i, [i + 1]."""

    tree: TokenTree
    likely: list[int]
    probs: Tensor | None
    random: RandomStream
    start: int


class AcceptanceRule(ABC):
    """How a model's tokens are chosen, and candidates accepted."""

    samples = True  # whether it needs distributions; otherwise logits are enough
    carries_q = False  # whether candidates carry the distribution that they were drawn from

    @abstractmethod
    def draw(self, at: Places) -> Tensor:
        """See :meth:`Places.draw`."""

    @abstractmethod
    def siblings(
        self, at: Places, counts: Sequence[int], replacement: bool
    ) -> list[list[Candidate]]:
        """See :meth:`Places.siblings`."""

    def confidences(self, at: Places) -> Tensor:
        """See :meth:`Places.confidences`."""
        return at.sampled

    def choices(self, reading: VerifierOutput) -> list[int]:
        """The verifier's own tokens: [0] after the text, [i + 1] after each node i."""
        return reading.likely

    @abstractmethod
    def verify(self, reading: VerifierOutput, choices: list[int], below: int = ROOT) -> Verdict:
        """Accept or reject the candidates `below` a node, given the verifier's :meth:`choices`."""

    @abstractmethod
    def others(self, verdict: Verdict, at: Places, count: int) -> list[int]:
        """At most `count` tokens that the verifier draws, without replacement, besides the
        verdict's; `at` is the one place after the accepted path."""


class _Equality(AcceptanceRule):
    """Both models choose the token with the largest score; a candidate that equals the target's
    choice is accepted."""

    least = -torch.inf  # a token must score more than this

    @abstractmethod
    def scores(self, at: Places) -> Tensor:
        """(n, vocabulary)"""

    def siblings(
        self, at: Places, counts: Sequence[int], replacement: bool
    ) -> list[list[Candidate]]:
        best = self._best(self.scores(at), max(counts))
        rows = zip(best, counts, strict=True)
        return [[(token, None) for token in row[:count]] for row, count in rows]

    def verify(self, reading: VerifierOutput, choices: list[int], below: int = ROOT) -> Verdict:
        return verify_greedy(reading.tree, choices, below)

    def others(self, verdict: Verdict, at: Places, count: int) -> list[int]:
        [best] = self._best(self.scores(at), count + 1)
        return [token for token in best if token != verdict.token][:count]

    def _best(self, scores: Tensor, count: int) -> list[list[int]]:
        """The `count` best tokens of each row (n, vocabulary) that can be chosen at all."""
        best = scores.topk(min(count, scores.shape[-1]))
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [[t for t, score in zip(*row, strict=True) if score > self.least] for row in rows]


class _Greedy(_Equality):
    samples = False

    def scores(self, at: Places) -> Tensor:
        return at.logits

    def draw(self, at: Places) -> Tensor:
        return at.likely()


class _Coupled(_Equality):
    least = 0.0

    def scores(self, at: Places) -> Tensor:
        return scores(at.sampled, [stream.noise for stream in at.streams], at.positions)

    def draw(self, at: Places) -> Tensor:
        return self.scores(at).argmax(dim=-1)

    def confidences(self, at: Places) -> Tensor:
        scores = self.scores(at)
        return scores / scores.sum(dim=-1, keepdim=True)

    def choices(self, reading: VerifierOutput) -> list[int]:
        tree, _, probs, random, start = reading
        assert probs is not None
        positions = [start, *(start + 1 + depth for depth in tree.depths()[: tree.read])]
        noises = [random.noise] * len(positions)
        coupled = scores(probs[: len(positions)], noises, positions)
        return list(coupled.argmax(dim=-1).tolist())


class _Rejection(AcceptanceRule):
    carries_q = True

    def draw(self, at: Places) -> Tensor:
        return quantile(at.sampled, [stream.uniform() for stream in at.streams])

    def siblings(
        self, at: Places, counts: Sequence[int], replacement: bool
    ) -> list[list[Candidate]]:
        rows = zip(at.streams, counts, strict=True)
        uniforms = [[stream.uniform() for _ in range(count)] for stream, count in rows]
        drawn, sources = draw_siblings(at.sampled, uniforms, replacement)
        carried = [source.unbind() for source in sources]
        return [
            [(token, carried[n][row]) for n, token in enumerate(tokens)]
            for row, tokens in enumerate(drawn)
        ]

    def verify(self, reading: VerifierOutput, choices: list[int], below: int = ROOT) -> Verdict:
        assert reading.probs is not None
        return verify_sampled(reading.tree, reading.probs, reading.random, below)

    def others(self, verdict: Verdict, at: Places, count: int) -> list[int]:
        assert verdict.left is not None
        tokens: list[int] = []
        left = verdict.left.clone()
        left[verdict.token] = 0
        while len(tokens) < count and left.sum() > 0:
            [token] = draw(left[None], [at.streams[0].uniform()])
            left[token] = 0
            tokens.append(token)
        return tokens


_GREEDY = _Greedy()
_SAMPLED = {"rejection": _Rejection(), "gumbel": _Coupled()}
