"""Warpers that depend on a request's sequence: bias, penalties, a minimum length, a grammar.

They change logits before temperature, top-k and top-p (:func:`specdec_core.tokens.sampling.warp`),
and under greedy decoding, too. At a node of a draft tree the sequence is the request's, followed by
the tokens on the path to the node. Target and draft are warped in the same way. So every place has
the distributions, and the argmax, that it would have if its tokens were committed.

Logits of requests without such rules stay unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec_core.config import Sampling
from specdec_core.tokens.grammar import Grammar, Grammars, Matcher


@dataclass(frozen=True, slots=True)
class TextRules:
    """What a request's text decides about its next token: the bias and the penalties of `sampling`,
    with a prompt of `prompt` tokens; none of `final` before `min_tokens` tokens of output; and what
    the `grammar` of the output allows."""

    sampling: Sampling
    prompt: int
    min_tokens: int = 0
    final: frozenset[int] = frozenset()
    grammar: Grammar | None = None

    def warper(self, grammars: Grammars) -> TextWarper | None:
        """Its warper; None where nothing depends on the text."""
        matcher = None if self.grammar is None else grammars.matcher(self.grammar)
        needed = self.sampling.edits_logits or (self.min_tokens > 0 and self.final)
        return TextWarper(self, matcher) if needed or matcher is not None else None


class TextWarper:
    """The warper of one request. It follows the request's text, which only grows."""

    def __init__(self, rules: TextRules, matcher: Matcher | None = None) -> None:
        self.rules, self.matcher = rules, matcher
        self._counts: dict[int, int] = {}  # of the text's tokens in the output; 0: in the prompt
        self._read = 0  # tokens of the text that are counted
        self._final = sorted(rules.final)

    def warp(self, logits: Tensor, text: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        """Logits in float32 for the token after `text` and then each of the n `paths`; `logits`
        (n, vocabulary). A draft's vocabulary may be smaller."""
        sampling, rules = self.rules.sampling, self.rules
        scores = logits.to(torch.float32, copy=True)
        size = scores.shape[-1]
        if bias := [(token, value) for token, value in sampling.logit_bias if token < size]:
            tokens, values = zip(*bias, strict=True)
            scores[:, list(tokens)] += scores.new_tensor(values)
        written = len(text) - rules.prompt
        if early := [n for n, path in enumerate(paths) if written + len(path) < rules.min_tokens]:
            final = [token for token in self._final if token < size]
            scores[torch.tensor(early)[:, None], torch.tensor(final, dtype=torch.long)] = -torch.inf
        if sampling.penalises:
            self._penalise(scores, text, paths)
        if self.matcher is not None:
            allowed = self.matcher.allowed(text[rules.prompt :], paths)[:, :size]
            scores.masked_fill_(torch.from_numpy(~allowed).to(scores.device), -torch.inf)
            # A reduced draft may have none of the tokens; what it proposes then is rejected.
            none = scores.amax(dim=-1) == -torch.inf
            if none.any():
                scores[none] = logits[none].float()
        return scores

    def _penalise(
        self, scores: Tensor, text: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> None:
        """Apply the penalties to `scores` (n, vocabulary)."""
        sampling, size = self.rules.sampling, scores.shape[-1]
        self._count(text)
        # A column for each token of the text, and then of the paths.
        columns = {token: column for column, token in enumerate(self._counts)}
        known = len(columns)
        for path in paths:
            for token in path:
                columns.setdefault(token, len(columns))
        counts = np.zeros((len(paths), len(columns)), dtype=np.float32)  # in the output
        counts[:, :known] = list(self._counts.values())
        for n, path in enumerate(paths):
            for token in path:
                counts[n, columns[token]] += 1
        factor = np.where(counts > 0, np.float32(sampling.repetition_penalty), np.float32(1))
        factor[:, :known] = sampling.repetition_penalty
        subtracted = sampling.frequency_penalty * counts
        subtracted[counts > 0] += sampling.presence_penalty
        tokens = np.array(list(columns))
        if tokens.max() >= size:
            inside = tokens < size
            tokens, subtracted, factor = tokens[inside], subtracted[:, inside], factor[:, inside]
        place, less, times = (
            torch.from_numpy(part).to(scores.device) for part in (tokens, subtracted, factor)
        )
        chosen = scores[:, place]
        scores[:, place] = torch.where(chosen < 0, chosen * times, chosen / times) - less

    def _count(self, text: Sequence[int]) -> None:
        for position in range(self._read, len(text)):
            token, in_output = text[position], position >= self.rules.prompt
            self._counts[token] = self._counts.get(token, 0) + in_output
        self._read = len(text)
