"""Sampled tokens have the target's probabilities.

On real prompts no text comes twice, so texts cannot be counted. But each sampled token y has a
known distribution p, the target's given the text before it, and for a function f in [0, 1] that is
chosen before y is known, f(y) − E_p f is a martingale difference of known variance. For the
indicator of a set of tokens the mean difference is by how much too often they are sampled: at most
the total variation from p. How often tokens of the set were sampled is compared with the law of a
sum of independent indicators with these expectations (Poisson binomial), which has the sum's mean
and variance where sampling is lossless, and unlike a normal law its skewness, too: sets that are
rarely drawn would exceed a normal law's limits too often.

The sets are those that a fault of verification would favour: what a draft proposes more often than
the target would (for a law (1 − λ)p + λq their shift is all of λ TV(p, q)), what a lookup
would copy, what the target likes best. The law of the first token is not touched by drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from specdec_core.base.observer import Observer
from specdec_core.config import Sampling
from specdec_core.evidence.certificate.certificate import Favour, SampledDistribution
from specdec_core.models.pair import Pair
from specdec_core.tokens.sampling import warp
from specdec_core.tokens.text_warper import TextRules, TextWarper

LEVEL = 1e-3  # false alarms of all sets together
_POWER = 0.99
_MATCH = 3  # tokens that a copied one comes after, at most
_NEGLIGIBLE = 1e-15  # of the probabilities of counts
_SLACK = 1e-3  # of top-p and min-p: rounding decides at their border

Text = tuple[tuple[int, ...], list[int]]  # a prompt and its output
# The set of tokens (positions, vocabulary) of each position of an output, by the prompt, the output
# and the target's probabilities (positions, vocabulary); only what comes before a position is used.
Favoured = Callable[[Sequence[int], Sequence[int], Tensor], Tensor]
# The target's probabilities (positions, vocabulary) for each token of an output behind its first,
# by the prompt and the output. Those that are unknown are 0.
Known = Callable[[Sequence[int], Sequence[int]], Tensor]


@torch.inference_mode()
def compare(
    pair: Pair,
    sampling: Sampling,
    texts: Sequence[Text],
    observer: Observer,
    known: Known | None = None,
) -> SampledDistribution:
    """Compare the tokens of sampled `texts` behind the first with the target's probabilities, read
    from one plain forward over each text. With `known`, the probabilities that sampling leaves
    unchanged are given, and the target's weights are not used."""
    kinds = _kinds(pair, sampling)
    sums = {kind: _Sum() for kind in kinds}
    tokens = impossible = 0
    observer.stage("the target's probabilities", len(texts))
    for prompt, output in texts:
        observer.step()
        if len(output) < 2:
            continue
        if known is None:
            logits = _edited(_logits(pair, prompt, output), sampling, prompt, output)
            probs = warp(logits, sampling).double()
            probs /= probs.sum(dim=-1, keepdim=True)
            possible = warp(logits, _looser(sampling)) > 0
        else:
            probs = known(prompt, output)
            possible = torch.ones_like(probs, dtype=torch.bool)  # by no warper excluded
        drawn = torch.tensor(output[1:], device=probs.device)[:, None]
        impossible += int((~possible.gather(1, drawn)).sum())
        tokens += len(output) - 1
        for kind, favoured in kinds.items():
            members = favoured(prompt, output, probs)
            if known is not None:
                members &= probs > 0
            sums[kind].add(members, probs, drawn)
    favours = tuple(sums[kind].favour(kind, tokens, len(sums)) for kind in kinds)
    return SampledDistribution(
        sampling=sampling,
        texts=len(texts),
        tokens=tokens,
        level=LEVEL,
        favours=favours,
        impossible=impossible,
    )


@dataclass
class _Sum:
    """Of the indicators of a set over all tokens: their expectations, and how many of the tokens
    that were drawn are in the set."""

    expected: list[float] = field(default_factory=list)
    drawn: int = 0

    def add(self, members: Tensor, probs: Tensor, drawn: Tensor) -> None:
        expected = (probs * members).sum(dim=-1)
        self.expected += expected.clamp(0, 1).tolist()
        self.drawn += int(members.gather(1, drawn).sum())

    def favour(self, kind: str, tokens: int, sets: int) -> Favour:
        deviation = sqrt(sum(p * (1 - p) for p in self.expected))
        found = float(norm.isf(LEVEL / sets / 2) + norm.ppf(_POWER)) * deviation
        count = max(tokens, 1)
        return Favour(
            kind=kind,
            shift=(self.drawn - sum(self.expected)) / count,
            error=deviation / count,
            p_value=_p_value(self.drawn, self.expected),
            detectable=found / count,
        )


def _p_value(count: int, expected: Sequence[float]) -> float:
    """The two-sided p-value of `count` under the law of a sum of independent indicators."""
    law, least = np.ones(1), 0  # law[n]: the probability of least + n
    for p in expected:
        law = np.convolve(law, (1 - p, p))
        kept = np.flatnonzero(law > _NEGLIGIBLE)
        law, least = law[kept[0] : kept[-1] + 1], least + int(kept[0])
    counts = least + np.arange(len(law))
    return min(1.0, 2 * float(min(law[counts <= count].sum(), law[counts >= count].sum())))


def _kinds(pair: Pair, sampling: Sampling) -> dict[str, Favoured]:
    """The sets of tokens that are counted, by name."""
    kinds: dict[str, Favoured] = {
        "the target's most likely": _most_likely,
        "copies from the text": _copies,
    }
    for name in pair.draft_models:

        def preferred(
            prompt: Sequence[int], output: Sequence[int], probs: Tensor, draft: str = name
        ) -> Tensor:
            q = warp(_logits(pair, prompt, output, draft), sampling).to(probs.device)
            members = torch.zeros_like(probs, dtype=torch.bool)
            # A draft model may lack the target's padding entries.
            members[:, : q.shape[-1]] = q > probs[:, : q.shape[-1]]
            return members

        kinds[f"preferred by the draft {name}"] = preferred
    return kinds


def _most_likely(prompt: Sequence[int], output: Sequence[int], probs: Tensor) -> Tensor:
    return torch.zeros_like(probs, dtype=torch.bool).scatter_(1, probs.argmax(1, True), True)


def _copies(prompt: Sequence[int], output: Sequence[int], probs: Tensor) -> Tensor:
    """What came after the latest of the longest matches with the text's end."""
    members = torch.zeros_like(probs, dtype=torch.bool)
    after: dict[tuple[int, ...], int] = {}  # the token behind some tokens
    text = [*prompt, *output]
    for end, token in enumerate(text):
        row = end - len(prompt) - 1
        endings = [tuple(text[end - n : end]) for n in range(min(_MATCH, end), 0, -1)]
        if row >= 0 and (match := next((e for e in endings if e in after), None)):
            members[row, after[match]] = True
        after |= dict.fromkeys(endings, token)
    return members


def _logits(
    pair: Pair, prompt: Sequence[int], output: Sequence[int], draft: str | None = None
) -> Tensor:
    """The logits (positions, vocabulary) for each token of an output behind its first."""
    return pair.logits([*prompt, *output[:-1]], draft)[len(prompt) :]


def _edited(
    logits: Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> Tensor:
    """`logits` (positions, vocabulary) with the penalties and biases of the text before each."""
    if not sampling.edits_logits:
        return logits
    return TextWarper(TextRules(sampling, len(prompt))).warp(
        logits, prompt, [output[:n] for n in range(1, len(output))]
    )


def _looser(sampling: Sampling) -> Sampling:
    """The same, but for a border where rounding decides what is cut off."""
    return sampling.model_copy(
        update={
            "top_k": sampling.top_k + 1 if sampling.top_k else 0,
            "top_p": min(sampling.top_p + _SLACK, 1.0),
            "min_p": sampling.min_p * (1 - _SLACK),
        }
    )
