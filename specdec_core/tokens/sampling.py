"""From logits to probabilities, and from probabilities to tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec_core.config import Sampling
from specdec_core.tokens import operator
from specdec_core.tokens.coupling import SharedNoise

_LIKELY = 256  # tokens that are looked at first for a nucleus


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities (..., vocabulary) in float32 after temperature, min-p, top-k and top-p, in this
    order, as in vLLM. Min-p drops tokens with less than that share of the largest probability;
    top-p keeps the smallest set of most likely tokens of at least that mass.

    The temperature must not be 0: greedy decoding has no distribution.
    """
    if operator.fits(logits):
        return operator.warp(logits, sampling)
    scores = tempered(logits, sampling.temperature)
    if sampling.min_p > 0:
        least = scores.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < least, -torch.inf)
    if 0 < sampling.top_k < scores.shape[-1]:
        smallest_kept = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < smallest_kept, -torch.inf)
    if sampling.top_p < 1:
        scores = scores.masked_fill(_beyond_nucleus(scores, sampling.top_p), -torch.inf)
    return scores.softmax(dim=-1)


def _beyond_nucleus(scores: Tensor, mass: float) -> Tensor:
    """Which tokens (..., vocabulary) are not in the smallest set of most likely tokens of at least
    that mass. Sorting a large vocabulary in every row of a round may take longer than the forward.
    So only some of the tokens are sorted first, and all where these are too few."""
    vocabulary = scores.shape[-1]
    rows = scores.reshape(-1, vocabulary)
    probabilities = rows.softmax(dim=-1)
    dropped = torch.ones_like(rows, dtype=torch.bool)
    left: slice | Tensor = slice(None)
    for count in (min(_LIKELY, vocabulary), vocabulary):
        # By scores: two different scores may have the same probability.
        some = rows[left]
        order = (some.topk(count) if count < vocabulary else some.sort(descending=True)).indices
        likely = probabilities[left].gather(-1, order)
        # In double precision, or the least nucleus mass becomes 0 and keeps nothing.
        reached = likely.cumsum(dim=-1, dtype=torch.float64)
        dropped[left] = dropped[left].scatter(-1, order, reached - likely >= mass)
        left = (reached[:, -1] < mass).nonzero()[:, 0]
        if count == vocabulary or not len(left):
            break
    return dropped.view_as(scores)


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Scores (..., vocabulary) in float32; their softmax is at `temperature`, above 0."""
    scores = logits.float()
    if temperature == 1:
        return scores
    # The largest becomes 0, so a score that overflows has probability 0 and not NaN.
    return (scores - scores.amax(dim=-1, keepdim=True)) / temperature


def distributions(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor | None:
    """The distributions of the rows of `logits` (rows, ..., vocabulary), each warped by its own
    sampling, at temperature 1 where that is greedy; None where all are greedy. Rows with equal
    sampling are warped together."""
    first = samplings[0]
    if all(sampling is first or sampling == first for sampling in samplings):
        return None if first.greedy else warp(logits, first)
    rows: dict[Sampling, list[int]] = {}
    for row, sampling in enumerate(samplings):
        rows.setdefault(sampling, []).append(row)
    if all(sampling.greedy for sampling in rows):
        return None
    probs = logits.float().softmax(dim=-1)
    for sampling, chosen in rows.items():
        if not sampling.greedy:
            probs[chosen] = warp(logits[chosen], sampling)
    return probs


def draw(probabilities: Tensor, uniforms: Sequence[float]) -> list[int]:
    """For each row of `probabilities` (rows, vocabulary) the token at that row's uniform number in
    [0, 1), by the inverse of the cumulative distribution.

    The weights need not sum to 1. A token of weight 0 is never drawn.
    """
    return quantile(probabilities, uniforms).tolist()


def quantile(probabilities: Tensor, uniforms: Sequence[float]) -> Tensor:
    """:func:`draw`'s tokens (rows,), still on their device."""
    return _quantiles(probabilities, torch.from_numpy(np.array(uniforms)[:, None]))[:, 0]


def draw_siblings(
    probabilities: Tensor, uniforms: Sequence[Sequence[float]], replacement: bool = False
) -> tuple[list[list[int]], list[Tensor]]:
    """Several tokens from each row of `probabilities` (rows, vocabulary), one for each of the row's
    uniform numbers; and the distributions (rows, vocabulary) that the first, second, … tokens were
    drawn from. Without `replacement` these leave out the tokens drawn before, and a row has fewer
    tokens where none of weight above 0 is left.
    """
    most = max(map(len, uniforms))
    padded = [[*row, *[0.0] * (most - len(row))] for row in uniforms]
    quantiles = torch.tensor(padded, dtype=torch.float64).reshape(len(padded), most)
    if replacement or most == 1:
        drawn = _quantiles(probabilities, quantiles).tolist()
        sources = [probabilities] * most
    else:
        left, sources = probabilities, []
        tokens: list[Tensor] = []
        for column in quantiles.split(1, dim=1):
            if tokens:
                left = left.scatter(1, tokens[-1].clamp(min=0), 0)
                total = left.sum(dim=1, keepdim=True)
                left = left / total.masked_fill(total == 0, 1)
            some = left.sum(dim=1, keepdim=True) > 0
            tokens.append(torch.where(some, _quantiles(left, column), -1))
            sources.append(left)
        drawn = torch.cat(tokens, dim=1).tolist()
    counted = zip(drawn, uniforms, strict=True)
    return [[t for t in row[: len(numbers)] if t >= 0] for row, numbers in counted], sources


def _quantiles(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The tokens (rows, n) at the uniform numbers (rows, n) of each row of `weights` (rows,
    vocabulary)."""
    if weights.dtype == torch.float32 and operator.fits(weights):
        return operator.quantiles(weights, uniforms.contiguous())
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    scaled = uniforms.to(cumulative.device) * cumulative[:, -1:]
    tokens, first = (
        torch.searchsorted(cumulative, place, right=True).clamp_(max=weights.shape[-1] - 1)
        for place in (scaled, torch.zeros_like(scaled))
    )
    # Rounding may reach the end, or in a GPU's parallel sums give a slice to a token of weight 0.
    return torch.where(weights.gather(-1, tokens) > 0, tokens, first)


class RandomStream:
    """A request's own randomness, independent of the other requests of its batch.

    `uniform()` is its next uniform number, `noise` what coupled sampling shares between models.
    The uniform numbers also depend on `written`, the number of tokens that another stream with the
    same seed has drawn, because those tokens depend on that stream's numbers. And they depend on
    `earlier`, the number of requests with the same seed before: a drafter may propose their
    outputs, which must not be judged by the numbers that they were drawn by.
    """

    def __init__(self, seed: int, vocab_size: int, written: int = 0, earlier: int = 0) -> None:
        since = [f"behind {written}"] * (written > 0) + [f"after {earlier}"] * (earlier > 0)
        own = random.Random(" ".join([str(seed), *since]) if since else seed)
        self.uniform = own.random
        self.noise = SharedNoise(seed, vocab_size)


def to_host(*values: Tensor) -> list[list[float]]:
    """The numbers of vectors of one length (n,) on one device, with a single copy from it."""
    if values[0].device.type == "cpu":
        return [vector.tolist() for vector in values]
    if len(values) == 1:
        return [values[0].tolist()]
    # Tokens are exact in double precision.
    return torch.stack([vector.double() for vector in values]).tolist()
