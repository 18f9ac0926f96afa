"""Which rule accepts a request's candidates, and how candidates are drawn for it.

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

import torch
from torch import Tensor

from specdec_core.config import Sampling
from specdec_core.tokens.coupling import race, scores
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
    """Where n tokens come next, and what a model says there: `logits` (n, vocabulary).

    Place i is the position `positions[i]` in the text of a request with that sampling and that
    randomness. `likely` gives the most likely tokens (n,); it is called for greedy requests only.
    """

    samplings: Sequence[Sampling]
    streams: Sequence[RandomStream]
    positions: Sequence[int]
    logits: Tensor
    likely: Callable[[], Tensor]

    @cached_property
    def probs(self) -> Tensor | None:
        """The distributions (n, vocabulary) that are drawn from, at temperature 1 where decoding is
        greedy; None where all is."""
        return distributions(self.logits, self.samplings)

    @property
    def sampled(self) -> Tensor:
        """`probs` where not all is greedy."""
        assert self.probs is not None
        return self.probs

    def draw(self) -> Tensor:
        """The tokens (n,) that the model chooses."""
        parts = self._by_rule()
        if len(parts) == 1:
            return parts[0][0].draw(self)
        drawn = torch.empty(len(self.positions), dtype=torch.long, device=self.logits.device)
        for rule, own, part in parts:
            drawn[own] = rule.draw(part)
        return drawn

    def carried(self) -> list[Tensor | None]:
        """The distributions that the tokens drawn carry as candidates."""
        if self.probs is None:
            return [None] * len(self.positions)
        rows = zip(self.samplings, self.probs.unbind(), strict=True)
        return [q if rule_of(sampling).carries_q else None for sampling, q in rows]

    def siblings(self, counts: Sequence[int], replacement: bool = False) -> list[list[Candidate]]:
        """At most `counts[i]` candidates for place i, in the order drawn; fewer where nothing else
        has any probability. With `replacement` a token may be drawn again."""
        found: list[list[Candidate]] = [[] for _ in counts]
        for rule, own, part in self._by_rule():
            drawn = rule.siblings(part, [counts[n] for n in own], replacement)
            for n, candidates in zip(own, drawn, strict=True):
                found[n] = candidates
        return found

    def confidences(self) -> Tensor:
        """How sure the model is of choosing each token (n, vocabulary): its probability; where
        sampling is coupled p / E, of which it chooses the largest, normalised."""
        if self.probs is None:
            return self.logits.float().softmax(dim=-1)
        found = torch.empty_like(self.probs)
        for rule, own, part in self._by_rule():
            found[own] = rule.confidences(part)
        return found

    def _by_rule(self) -> list[tuple[AcceptanceRule, list[int], Places]]:
        rules: dict[AcceptanceRule, list[int]] = {}
        for n, sampling in enumerate(self.samplings):
            rules.setdefault(rule_of(sampling), []).append(n)
        if len(rules) == 1:
            return [(rule, own, self) for rule, own in rules.items()]
        return [(rule, own, self._part(own)) for rule, own in rules.items()]

    def _part(self, own: list[int]) -> Places:
        part = Places(
            [self.samplings[n] for n in own],
            [self.streams[n] for n in own],
            [self.positions[n] for n in own],
            self.logits[own],
            lambda: self.likely()[own],
        )
        part.probs = None if self.probs is None else self.probs[own]
        return part


class AcceptanceRule(ABC):
    """How a model's tokens are chosen, and candidates accepted."""

    carries_q = False  # whether a candidate carries the distribution that it was drawn from

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

    def choices(
        self,
        tree: TokenTree,
        likely: list[int],
        probs: Tensor | None,
        random: RandomStream,
        start: int,
    ) -> list[int]:
        """The verifier's own tokens: at the position `start`, where `tree` begins, [0], and behind
        each node i that it has read, [i + 1]. `likely` are its most likely ones, `probs` (1 +
        nodes, vocabulary) its distributions."""
        return likely

    @abstractmethod
    def verify(
        self,
        tree: TokenTree,
        choices: list[int],
        probs: Tensor | None,
        random: RandomStream,
        below: int = ROOT,
    ) -> Verdict:
        """Accept or reject what is `below` a node, by the verifier's :meth:`choices` and its
        distributions (1 + nodes, vocabulary)."""

    @abstractmethod
    def others(self, verdict: Verdict, at: Places, count: int) -> list[int]:
        """At most `count` tokens that the verifier might have said in place of the verdict's own,
        without replacement; `at` is the one place behind the accepted path."""


class _Equality(AcceptanceRule):
    """Each model chooses the token with the largest score; an equal candidate is accepted."""

    least = -torch.inf  # a token must score more than this

    @abstractmethod
    def scores(self, at: Places) -> Tensor:
        """(n, vocabulary)"""

    def siblings(
        self, at: Places, counts: Sequence[int], replacement: bool
    ) -> list[list[Candidate]]:
        best = self._best(self.scores(at), max(counts))
        rows = zip(best, counts, strict=True)
        return [[(token, None) for token in own[:count]] for own, count in rows]

    def verify(
        self,
        tree: TokenTree,
        choices: list[int],
        probs: Tensor | None,
        random: RandomStream,
        below: int = ROOT,
    ) -> Verdict:
        return verify_greedy(tree, choices, below)

    def others(self, verdict: Verdict, at: Places, count: int) -> list[int]:
        [best] = self._best(self.scores(at), count + 1)
        return [token for token in best if token != verdict.token][:count]

    def _best(self, scores: Tensor, count: int) -> list[list[int]]:
        """The `count` best tokens of each row (n, vocabulary) that can be chosen at all."""
        best = scores.topk(min(count, scores.shape[-1]))
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [[t for t, own in zip(*row, strict=True) if own > self.least] for row in rows]


class _Greedy(_Equality):
    def scores(self, at: Places) -> Tensor:
        return at.logits

    def draw(self, at: Places) -> Tensor:
        return at.likely()


class _Coupled(_Equality):
    least = 0.0

    def scores(self, at: Places) -> Tensor:
        return scores(at.sampled, [own.noise for own in at.streams], at.positions)

    def draw(self, at: Places) -> Tensor:
        return self.scores(at).argmax(dim=-1)

    def confidences(self, at: Places) -> Tensor:
        own = self.scores(at)
        return own / own.sum(dim=-1, keepdim=True)

    def choices(
        self,
        tree: TokenTree,
        likely: list[int],
        probs: Tensor | None,
        random: RandomStream,
        start: int,
    ) -> list[int]:
        assert probs is not None
        positions = [start, *(start + 1 + depth for depth in tree.depths()[: tree.read])]
        noises = [random.noise] * len(positions)
        return list(race(probs[: len(positions)], noises, positions).tolist())


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
            [(token, carried[n][row]) for n, token in enumerate(own)]
            for row, own in enumerate(drawn)
        ]

    def verify(
        self,
        tree: TokenTree,
        choices: list[int],
        probs: Tensor | None,
        random: RandomStream,
        below: int = ROOT,
    ) -> Verdict:
        assert probs is not None
        return verify_sampled(tree, probs, random, below)

    def others(self, verdict: Verdict, at: Places, count: int) -> list[int]:
        assert verdict.left is not None
        found: list[int] = []
        left = verdict.left.clone()
        left[verdict.token] = 0
        while len(found) < count and left.sum() > 0:
            [token] = draw(left[None], [at.streams[0].uniform()])
            left[token] = 0
            found.append(token)
        return found


_GREEDY = _Greedy()
_SAMPLED = {"rejection": _Rejection(), "gumbel": _Coupled()}
