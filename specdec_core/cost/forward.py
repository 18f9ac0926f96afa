"""The cost of one model's forward passes as a function of width, context and batch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from pydantic import Field

from specdec_core.config import Value
from specdec_core.cost.fitting import nonnegative_least_squares, r_squared


class Measurement(Value):
    """One forward, measured: `batch` rows of `width` new tokens after `context` cached ones."""

    width: int
    context: int
    batch: int
    seconds: float  # median over the repeats


class Terms(Value):
    """t(n, c, b) = fixed + per_token · n·b + per_cached · c·b + per_pair · n·c·b  for width n,
    context c and batch b.

    The weights are read once whatever is fed in (fixed), the layers' arithmetic grows with the
    tokens fed in, reading keys and values with the tokens cached, and attention's arithmetic with
    the pairs of both. No coefficient is negative: more work is never faster, even where the fit
    extrapolates. As t is affine in n, rounds take as long as rounds of their mean width.
    """

    fixed: float
    per_token: float
    per_cached: float
    per_pair: float

    @classmethod
    def fit(cls, measurements: Sequence[Measurement]) -> Terms:
        """Least squares of the relative error, so that the cheap forwards, which are the most
        frequent, count as much as the large ones."""
        shapes = np.array([(m.width, m.context, m.batch) for m in measurements], dtype=float)
        seconds = np.array([m.seconds for m in measurements])
        columns = np.stack(_products(*shapes.T), axis=1)
        terms = nonnegative_least_squares(columns / seconds[:, None], np.ones(len(seconds)))
        return cls(**dict(zip(cls.model_fields, terms, strict=True)))

    def seconds(self, width: float, context: float, batch: int) -> float:
        products = _products(width, context, batch)
        coefficients = (self.fixed, self.per_token, self.per_cached, self.per_pair)
        return float(sum(c * p for c, p in zip(coefficients, products, strict=True)))


def _products(width: Any, context: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
    return batch / batch, width * batch, context * batch, width * context * batch


class ForwardKind(StrEnum):
    """Forwards that run different kernels."""

    TOKEN = "token"  # one token of one row: matrix-vector products
    ROWS = "rows"  # one token of each of several rows: attention of single queries
    WIDE = "wide"  # several tokens a row

    @classmethod
    def of(cls, width: float, batch: int) -> ForwardKind:
        return cls.WIDE if width > 1 else cls.ROWS if batch > 1 else cls.TOKEN


# The kinds that stand in for one that was not measured, in this order.
_STAND_IN = {
    ForwardKind.TOKEN: (ForwardKind.TOKEN, ForwardKind.ROWS, ForwardKind.WIDE),
    ForwardKind.ROWS: (ForwardKind.ROWS, ForwardKind.WIDE, ForwardKind.TOKEN),
    ForwardKind.WIDE: (ForwardKind.WIDE, ForwardKind.ROWS, ForwardKind.TOKEN),
}


class ForwardCost(Value):
    """Forward seconds of one model as a function of width, context and batch.

    The kinds of forward are fitted apart: less work can take longer where it runs other kernels
    (on a CPU one token is often slower than two). So is reading a prompt, which needs no logits;
    `prefill` is unset where it was not measured. `steps` are what numbers of tokens took over
    their fit, by kind and number, where times follow them (:meth:`in_steps`).
    """

    measurements: list[Measurement]
    terms: dict[ForwardKind, Terms]
    r2: float
    prefill: Terms | None = None
    steps: dict[ForwardKind, dict[int, float]] = Field(default={})

    @classmethod
    def fit(cls, measurements: Sequence[Measurement]) -> ForwardCost:
        """Fit each kind that was measured. Raises ValueError without measurements."""
        if not measurements:
            raise ValueError("no measurements to fit")
        groups: dict[ForwardKind, list[Measurement]] = {}
        for m in measurements:
            groups.setdefault(ForwardKind.of(m.width, m.batch), []).append(m)
        terms = {kind: Terms.fit(group) for kind, group in groups.items()}
        return cls(measurements=list(measurements), terms=terms, r2=0.0)._judged()

    @classmethod
    def constant(cls, seconds: float) -> ForwardCost:
        """The same time whatever is fed in."""
        flat = Terms(fixed=seconds, per_token=0, per_cached=0, per_pair=0)
        one = Measurement(width=1, context=0, batch=1, seconds=seconds)
        return cls(measurements=[one], terms={ForwardKind.TOKEN: flat}, r2=1.0)

    @property
    def typical_context(self) -> float:
        """The median context measured; the default of `seconds`."""
        return statistics.median(m.context for m in self.measurements)

    @property
    def worst_error(self) -> float:
        """Largest relative deviation of the fit from a measurement."""
        return max(
            abs(self.seconds(m.width, m.context, m.batch) / m.seconds - 1)
            for m in self.measurements
        )

    def in_steps(self) -> ForwardCost:
        """The same by what each measured number of tokens took instead of a line through all:
        kernels take tokens in blocks, so that time grows in steps."""
        over: dict[ForwardKind, dict[int, list[float]]] = {}
        for m in self.measurements:
            took = m.seconds / self.seconds(m.width, m.context, m.batch)
            of_kind = over.setdefault(ForwardKind.of(m.width, m.batch), {})
            of_kind.setdefault(m.width * m.batch, []).append(took)
        steps = {
            kind: {tokens: statistics.geometric_mean(each) for tokens, each in sorted(own.items())}
            for kind, own in over.items()
        }
        return self.model_copy(update={"steps": steps})._judged()

    def _judged(self) -> ForwardCost:
        """The same with its r²."""
        seconds = np.array([m.seconds for m in self.measurements])
        told = [self.seconds(m.width, m.context, m.batch) for m in self.measurements]
        return self.model_copy(update={"r2": r_squared(seconds, np.array(told))})

    def with_prefill(self, seconds: Mapping[int, float]) -> ForwardCost:
        """The same with prefill fitted to what prompts of some lengths took."""
        measured = [
            Measurement(width=tokens, context=tokens // 2, batch=1, seconds=taken)
            for tokens, taken in seconds.items()
        ]
        return self.model_copy(update={"prefill": Terms.fit(measured)})

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds of the prefill of a prompt of `tokens` tokens; each token sees half of the prompt
        on average. 0 where prefill was not measured."""
        return self.prefill.seconds(tokens, tokens // 2, 1) if self.prefill and tokens else 0.0

    def seconds(self, width: float = 1, context: float | None = None, batch: int = 1) -> float:
        """Seconds of one forward. `width` may be a mean over forwards; one between 1 and 2 is a
        mixture of both."""
        context = self.typical_context if context is None else context
        if 1 < width < 2:
            one, two = self.seconds(1, context, batch), self.seconds(2, context, batch)
            return one + (width - 1) * (two - one)
        kind = next(k for k in _STAND_IN[ForwardKind.of(width, batch)] if k in self.terms)
        seconds = self.terms[kind].seconds(width, context, batch)
        if steps := self.steps.get(kind):
            seconds *= float(np.interp(width * batch, list(steps), list(steps.values())))
        return seconds
