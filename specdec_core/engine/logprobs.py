"""The target's log-probabilities of a request's output tokens and of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_core.tokens.statistics import TokenLogprobs
from specdec_core.tokens.token_tree import ROOT, TokenTree


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of a request's output, with the `count` most likely tokens at each place.
    `tokens` has all rounds so far."""

    count: int
    tokens: list[TokenLogprobs] = field(default_factory=list)
    _start: Tensor | None = None  # (1, vocabulary) logits where the tree's first tokens were drawn

    def add(
        self,
        tree: TokenTree,
        path: Sequence[int],
        tokens: Sequence[int],
        logits: Tensor,
        draws_start: bool,
    ) -> list[TokenLogprobs]:
        """The log-probabilities of a round's new `tokens`: the accepted `path` of the tree and, in
        most rounds, a token that the target chose itself. `logits` are the target's (places,
        vocabulary), after the sequence and each node that it was fed; of the nodes alone where the
        target began the tree. With `draws_start` the target draws the first tokens of the next tree
        after the path."""
        if len(logits) == tree.read:
            assert self._start is not None
            logits = torch.cat([self._start, logits])
        end = path[-1] if path else ROOT
        if draws_start:
            self._start = logits[end + 1][None].clone()
        before = [*(tree.parents[node] for node in path), end][: len(tokens)]
        new = measured(logits[[place + 1 for place in before]], tokens, self.count)
        self.tokens += new
        return new


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of a `prompt`'s tokens after its first, with the `count` most likely tokens
    at each place. `tokens` has all chunks so far."""

    prompt: Sequence[int]
    count: int
    tokens: list[TokenLogprobs] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all are known."""
        return len(self.tokens) == len(self.prompt) - 1

    def add(self, start: int, logits: Tensor) -> None:
        """Add the chunk with the `logits` (n, vocabulary) after the tokens from position `start`
        on. A chunk that is prefilled again after preemption adds nothing."""
        known = len(self.tokens)
        new = self.prompt[known + 1 : start + len(logits) + 1]
        if new:
            self.tokens += measured(logits[known - start :][: len(new)], new, self.count)


def measured(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """The log-probabilities of `tokens` (n,) drawn from `logits` (n, vocabulary), in float32, and
    the `count` largest."""
    scores = logits.float().log_softmax(dim=-1)
    drawn = torch.tensor(tokens, dtype=torch.long, device=scores.device)  # perhaps none
    own = scores.gather(1, drawn[:, None])[:, 0]
    top = scores.topk(count, dim=-1)
    rows = zip(tokens, own.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, value, tuple(zip(likely, values, strict=True)))
        for token, value, likely, values in rows
    ]
