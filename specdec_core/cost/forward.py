"""The cost of a model's forward passes, of rows of any lengths or by width, context and batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from specdec_core.config import Value
from specdec_core.cost.fitting import nonnegative_least_squares, r_squared

FEW = 16  # tokens of a row that, up to fewer than these, read keys and values for few queries

# Tokens of a forward from which on arithmetic may dominate; a fit chooses one of them.
KNEES = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512)


class Work(NamedTuple):
    """What a packed forward does, summed over its rows."""

    rows: float = 0
    tokens: float = 0  # fed
    cached: float = 0  # in the cache before
    pairs: float = 0  # of a token fed and a token cached before it
    few_pairs: float = 0  # pairs in rows of fewer than FEW tokens

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int]]) -> Work:
        """The work of rows, (tokens, context) each."""
        rows = list(rows)
        pairs = [tokens * (context + (tokens - 1) / 2) for tokens, context in rows]
        few = (each for each, (tokens, _) in zip(pairs, rows, strict=True) if tokens < FEW)
        return cls(
            len(rows),
            sum(tokens for tokens, _ in rows),
            sum(context for _, context in rows),
            sum(pairs),
            sum(few),
        )

    @classmethod
    def uniform(cls, width: float, context: float, batch: int) -> Work:
        """The work of `batch` rows alike, with one number of pairs for each token: affine in the
        width, so that forwards take as long as forwards of their mean width."""
        tokens = width * batch
        return cls(batch, tokens, context * batch, tokens * context)


class ForwardTerms(Value):
    """t = fixed + per_row · rows + per_token · tokens + per_cached · cached + per_pair · pairs
    + per_few_pair · few_pairs + per_token_beyond · max(tokens − knee, 0): seconds of a forward's
    :class:`Work`.

    The weights are read once (fixed). Up to some number of tokens they are waited for, and more
    tokens cost little; beyond that knee arithmetic sets the pace. Keys and values are read once a
    row (per_cached). Attention's arithmetic grows with the pairs of tokens fed and seen; where few
    queries share what is read, a pair costs more than in a chunk of a prompt (per_few_pair).
    """

    fixed: float = Field(default=0.0, ge=0)
    per_row: float = Field(default=0.0, ge=0)
    per_token: float = Field(default=0.0, ge=0)
    per_cached: float = Field(default=0.0, ge=0)
    per_pair: float = Field(default=0.0, ge=0)
    per_few_pair: float = Field(
        default=0.0, ge=0, description=f"the more in rows of fewer than {FEW} tokens"
    )
    per_token_beyond: float = Field(default=0.0, ge=0)
    knee: int = Field(default=0, ge=0, description="tokens from which on `per_token_beyond` counts")

    @classmethod
    def fit(
        cls, works: Sequence[Work], seconds: Sequence[float], knees: Sequence[int] = KNEES
    ) -> ForwardTerms:
        """Non-negative least squares of the relative error, so that the cheap forwards, which are
        the most frequent, count as much as the large ones; with the knee that fits best, if any.
        Raises ValueError without measurements."""
        if not works:
            raise ValueError("no measurements to fit")
        names = [name for name in cls.model_fields if name != "knee"]
        work, measured = np.array(works, dtype=float), np.array(seconds)
        best, least = cls(), np.inf
        for knee in (0, *knees):
            beyond = np.maximum(work[:, 1] - knee, 0) if knee else np.zeros(len(work))
            columns = np.column_stack([np.ones(len(work)), work, beyond]) / measured[:, None]
            terms = nonnegative_least_squares(columns, np.ones(len(work)))
            error = float(np.square(columns @ terms - 1).sum())
            if error < least * (1 - 1e-6):
                values: dict[str, Any] = dict(zip(names, terms, strict=True))
                best, least = cls(**values, knee=knee), error
        return best

    def seconds(self, work: Work) -> float:
        beyond = self.per_token_beyond * max(work.tokens - self.knee, 0)
        return self.fixed + self.of_rows(work) + beyond

    def of_rows(self, work: Work) -> float:
        """The seconds that each row adds, whatever other rows there are."""
        return (
            self.per_row * work.rows
            + self.per_token * work.tokens
            + self.per_cached * work.cached
            + self.per_pair * work.pairs
            + self.per_few_pair * work.few_pairs
        )


class Measurement(Value):
    """One forward, measured: `batch` rows of `width` new tokens after `context` cached ones."""

    width: int
    context: int
    batch: int
    seconds: float  # median over the repeats

    @property
    def work(self) -> Work:
        return Work.uniform(self.width, self.context, self.batch)


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
    their fit, by kind and number, where times follow them (:meth:`in_steps`). One number, of
    seconds, is read as the same time for every forward.
    """

    measurements: list[Measurement]
    terms: dict[ForwardKind, ForwardTerms]
    r2: float
    prefill: ForwardTerms | None = None
    steps: dict[ForwardKind, dict[int, float]] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _one_number_is_constant(cls, value: Any) -> Any:
        if not isinstance(value, int | float | str):  # YAML reads 2e-1 as text
            return value
        with suppress(ValueError):
            if 0 < float(value) < math.inf:
                return dict(cls.constant(float(value)))
        raise ValueError("expected seconds, a number greater than 0")

    @classmethod
    def fit(cls, measurements: Sequence[Measurement]) -> ForwardCost:
        """Fit each kind that was measured. Raises ValueError without measurements."""
        if not measurements:
            raise ValueError("no measurements to fit")
        groups: dict[ForwardKind, list[Measurement]] = {}
        for m in measurements:
            groups.setdefault(ForwardKind.of(m.width, m.batch), []).append(m)
        terms = {kind: _affine(group) for kind, group in groups.items()}
        return cls(measurements=list(measurements), terms=terms, r2=0.0)._judged()

    @classmethod
    def constant(cls, seconds: float) -> ForwardCost:
        """The same time whatever is fed in, as Eq. 3.1 of SpecDec++ assumes."""
        flat = ForwardTerms(fixed=seconds)
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
        return self.model_copy(update={"prefill": _affine(measured)})

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds of the prefill of a prompt of `tokens` tokens; each token sees half of the prompt
        on average. 0 where prefill was not measured."""
        if self.prefill is None or not tokens:
            return 0.0
        return self.prefill.seconds(Work.uniform(tokens, tokens // 2, 1))

    def seconds(self, width: float = 1, context: float | None = None, batch: int = 1) -> float:
        """Seconds of one forward. `width` may be a mean over forwards; one between 1 and 2 is a
        mixture of both."""
        context = self.typical_context if context is None else context
        if 1 < width < 2:
            one, two = self.seconds(1, context, batch), self.seconds(2, context, batch)
            return one + (width - 1) * (two - one)
        kind = next(k for k in _STAND_IN[ForwardKind.of(width, batch)] if k in self.terms)
        seconds = self.terms[kind].seconds(Work.uniform(width, context, batch))
        if steps := self.steps.get(kind):
            seconds *= float(np.interp(width * batch, list(steps), list(steps.values())))
        return seconds


def _affine(measured: Sequence[Measurement]) -> ForwardTerms:
    """A fit that is affine in the width: without a knee."""
    return ForwardTerms.fit([m.work for m in measured], [m.seconds for m in measured], knees=())
