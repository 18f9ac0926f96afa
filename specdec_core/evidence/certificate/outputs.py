"""The output with speculation is the output without, in this library's engine and in a server.

Greedy outputs are compared token by token. Sampled tokens are compared with the probabilities that
decoding without speculation gives them (:mod:`specdec_core.evidence.certificate.distribution`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from specdec_core.base.observer import Observer
from specdec_core.config import AUTOREGRESSIVE, Sampling
from specdec_core.engine import Engine, Request
from specdec_core.evidence.bench.result import first_difference
from specdec_core.evidence.certificate.certificate import Checks, GreedyIdentity
from specdec_core.evidence.certificate.distribution import Known, compare
from specdec_core.models.pair import Pair

SAMPLING = Sampling(temperature=1.0)
_TIE = 0.5  # difference of two logits that rounding to bfloat16 or float16 may turn round


@dataclass(frozen=True)
class Asked:
    """The requests of the checks."""

    greedy: list[Request]
    sampled: list[Request]

    @classmethod
    def of(cls, greedy: list[Request], texts: int) -> Asked:
        """`texts` sampled outputs for each greedy one."""
        sampled = [
            replace(request, id=f"{request.id} {n}", seed=number * texts + n)
            for number, request in enumerate(greedy)
            for n in range(texts)
        ]
        return cls(greedy, sampled)


@dataclass(frozen=True)
class Speculated:
    """The outputs with speculation; `sampling` is that of the sampled ones."""

    greedy: list[list[int]]
    sampled: list[list[int]]
    sampling: Sampling = SAMPLING


@dataclass(frozen=True)
class Reference:
    """Decoding without speculation: greedy outputs; by how much it prefers one token to another
    behind given ones; and probabilities, unless the target's weights give them."""

    greedy: Sequence[Sequence[int]]
    margin: Callable[[Sequence[int], int, int], float]
    known: Known | None = None

    @classmethod
    def of_weights(
        cls,
        pair: Pair,
        asked: Asked,
        observer: Observer,
        sampling: Sampling | None = None,
        greedy: Sequence[Sequence[int]] | None = None,
    ) -> Reference:
        """The loaded target, with the penalties and biases of `sampling`; with `greedy`, for all
        but these outputs."""
        if greedy is None:
            observer.stage("greedy texts, autoregressive", len(asked.greedy))
            own = (sampling or Sampling()).model_copy(update={"temperature": 0.0})
            engine = Engine(pair, AUTOREGRESSIVE.model_copy(update={"sampling": own}))
            generations = engine.generate(asked.greedy, lambda _: observer.step())
            greedy = [each.tokens for each in generations]
        return cls(greedy, partial(_margin, pair))


def check_outputs(
    found: Speculated,
    reference: Reference,
    asked: Asked,
    pair: Pair,
    dtype: str,
    slots: int,
    observer: Observer,
) -> Checks:
    """Compare outputs with a reference. The target that wrote them, up to `slots` at a time,
    computes in `dtype`; `pair` has the drafts, and the target where that is the reference."""
    texts = [(r.tokens, output) for r, output in zip(asked.sampled, found.sampled, strict=True)]
    return Checks(
        greedy=compared_greedy(found, reference, asked, dtype, slots),
        sampled=compare(pair, found.sampling, texts, observer, reference.known),
    )


def compared_greedy(
    found: Speculated, reference: Reference, asked: Asked, dtype: str, slots: int
) -> GreedyIdentity:
    differing, ties, first = 0, 0, ""
    for request, ours, theirs in zip(asked.greedy, found.greedy, reference.greedy, strict=True):
        at = first_difference(ours, theirs)
        if at is None:
            continue
        differing += 1
        if at == min(len(ours), len(theirs)):
            first = first or f"prompt {request.id}, after token {at}: one of the texts ends there"
            continue
        if first and dtype == "float32":
            continue  # a margin may cost a request, and only rounding makes ties
        higher = reference.margin([*request.tokens, *theirs[:at]], theirs[at], ours[at])
        ties += dtype != "float32" and higher < _TIE
        # A logit that is next to nothing higher tells of a tie that rounding decides, not a fault.
        first = first or (
            f"prompt {request.id}, token {at}: {ours[at]} in place of {theirs[at]}, whose logit is"
            f" {higher:.2g} higher"
        )
    return GreedyIdentity(
        prompts=len(asked.greedy),
        tokens=sum(map(len, reference.greedy)),
        slots=slots,
        differing=differing,
        first=first,
        ties=ties,
        dtype=dtype,
    )


def _margin(pair: Pair, tokens: Sequence[int], preferred: int, other: int) -> float:
    """By how much the target's logit of one token is higher than that of another."""
    logits = pair.logits(tokens)[-1].float()
    return float(logits[preferred] - logits[other])
