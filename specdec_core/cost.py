"""What forward passes cost, and what counts of forward passes therefore cost.

N_draft, N_target and N_discarded say how much work a configuration does and do not depend on the
hardware; a :class:`Profile` says what that work costs here. Together they predict the time of any
configuration (SpecDec++, Eq. 3.1, 3.2 and 5.1) without running it. All times are seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from specdec_core.config import describe
from specdec_core.errors import UserError
from specdec_core.files import write_atomically
from specdec_core.stats import Counts

if TYPE_CHECKING:
    pass


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measurement(_Value):
    """One forward, measured: `batch` rows of `width` new tokens after `context` cached ones."""

    width: int
    context: int
    batch: int
    seconds: float  # median over the repeats


class ForwardCost(_Value):
    """Forward seconds as a function of width n, context c and batch b.

        t(n, c, b) = fixed + per_token · n·b + per_cached · c·b

    The weights are read once whatever is fed in (fixed), arithmetic grows with the tokens fed in
    (n·b) and attention reads every cached key and value (c·b). One token alone goes through
    matrix-vector kernels and several through matrix-matrix kernels, so the fixed part has two
    values, `single` and `several`. All coefficients are non-negative: more work is never faster,
    also where the fit extrapolates. Affine in n, so the time of many rounds is that of their mean
    width.
    """

    measurements: list[Measurement]
    single: float
    several: float
    per_token: float
    per_cached: float
    r2: float

    @classmethod
    def fit(cls, measurements: Sequence[Measurement]) -> ForwardCost:
        """Least squares of the *relative* error, so that one-token forwards, which are the most
        frequent, count as much as the large ones. Raises ValueError without measurements."""
        if not measurements:
            raise ValueError("no measurements to fit")
        seconds = np.array([m.seconds for m in measurements])
        batch = np.array([m.batch for m in measurements])
        tokens = batch * np.array([m.width for m in measurements])
        cached = batch * np.array([m.context for m in measurements])
        fixed = [tokens == 1, tokens > 1]
        if not (fixed[0].any() and fixed[1].any()):
            fixed = [np.ones(len(tokens))]
        columns = np.stack([*fixed, tokens, cached], axis=1).astype(float)
        *fixed_part, per_token, per_cached = nonnegative_least_squares(
            columns / seconds[:, None], np.ones(len(seconds))
        )
        predicted = columns @ np.array([*fixed_part, per_token, per_cached])
        return cls(
            measurements=list(measurements),
            single=fixed_part[0],
            several=fixed_part[-1],
            per_token=per_token,
            per_cached=per_cached,
            r2=r_squared(seconds, predicted),
        )

    @property
    def typical_context(self) -> float:
        """The median context measured: what `seconds` assumes when it is told none."""
        return statistics.median(m.context for m in self.measurements)

    def seconds(self, width: float = 1, context: float | None = None, batch: int = 1) -> float:
        """Seconds of one forward. `width` may be a mean over rounds; a mean between one and two
        tokens is a mixture of both fixed costs."""
        context = self.typical_context if context is None else context
        tokens = width * batch
        mixture = min(max(tokens - 1, 0.0), 1.0)
        fixed = (1 - mixture) * self.single + mixture * self.several
        return fixed + self.per_token * tokens + self.per_cached * context * batch

    @property
    def worst_error(self) -> float:
        """Largest relative deviation of the fit from a measurement."""
        return max(
            abs(self.seconds(m.width, m.context, m.batch) / m.seconds - 1)
            for m in self.measurements
        )


class Profile(_Value):
    """What forwards of a pair cost on one machine.

    `round_overhead` and `draft_overhead` are seconds that the engine adds to a round and to a
    drafting step around the forwards themselves.
    """

    target: ForwardCost
    drafts: dict[str, ForwardCost]
    device: str
    target_dtype: str
    draft_dtype: str
    threads: int = 1
    round_overhead: float = 0.0
    draft_overhead: dict[str, float] = {}

    def t_target(self, width: float = 1, context: float | None = None, batch: int = 1) -> float:
        """Seconds of a target forward of `width` tokens."""
        return self.target.seconds(width, context, batch)

    def t_draft(
        self, draft: str | None = None, context: float | None = None, batch: int = 1
    ) -> float:
        """Seconds of a drafting step: a forward of one token and what surrounds it. `draft` unset
        is the pair's first draft."""
        if not self.drafts:
            raise ValueError("the profile has no draft model")
        draft = next(iter(self.drafts)) if draft is None else draft
        forward = self.drafts[draft].seconds(1, context, batch)
        return forward + self.draft_overhead.get(draft, 0.0)

    def estimate_seconds(
        self,
        counts: Counts | Mapping[str, int],
        draft: str | None = None,
        context: float | None = None,
        batch: int = 1,
    ) -> float:
        """Eq. 3.1, t_draft·N_draft + t_target·N_target, with the cost of verifying several tokens.

        A verification feeds the round's candidates and the token before them, so its width is
        1 + drafted on average. A batch shares each forward among its rows. Prefill is not included.
        """
        counts = _counts(counts)
        if not counts.n_target:
            return 0.0
        seconds = counts.n_target * (
            self.t_target(_width(counts), context, batch) + self.round_overhead
        )
        if counts.n_draft:
            seconds += counts.n_draft * self.t_draft(draft, context, batch)
        return seconds / batch

    def autoregressive_seconds(
        self, tokens: int, context: float | None = None, batch: int = 1
    ) -> float:
        """Seconds of decoding `tokens` tokens without drafting."""
        return tokens * (self.t_target(1, context, batch) + self.round_overhead) / batch

    def speedup(
        self,
        counts: Counts | Mapping[str, int],
        draft: str | None = None,
        context: float | None = None,
        batch: int = 1,
    ) -> float:
        """Predicted improvement factor over autoregressive decoding of the same N tokens; 1 when
        nothing was generated."""
        counts = _counts(counts)
        if not counts.n:
            return 1.0
        return self.autoregressive_seconds(counts.n, context, batch) / self.estimate_seconds(
            counts, draft, context, batch
        )

    def latency(
        self,
        counts: Counts | Mapping[str, int],
        draft: str | None = None,
        context: float | None = None,
        batch: int = 1,
    ) -> float:
        """Eq. 5.1: seconds a token from the discard and verification rates. The same as
        `estimate_seconds` / N where Lemma 3.1's identity holds."""
        counts = _counts(counts)
        rates = counts.metrics()
        t_target = self.t_target(_width(counts), context, batch) + self.round_overhead
        return (
            latency(
                self.t_draft(draft, context, batch),
                t_target,
                rates["discard_rate"],
                rates["verification_rate"],
            )
            / batch
        )

    def oracle(
        self, disagreements: Sequence[int], lengths: Sequence[int], draft: str | None = None
    ) -> tuple[Counts, float]:
        """The oracle's counts (:func:`oracle_counts`) and predicted speedup with `draft`."""
        counts = oracle_counts(disagreements, lengths)
        return counts, self.speedup(counts, draft)

    def save(self, path: str | Path) -> Path:
        return write_atomically(Path(path), self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a saved profile; a missing or malformed one is a :class:`UserError`."""
        try:
            return cls.model_validate_json(Path(path).read_text())
        except (FileNotFoundError, IsADirectoryError):
            raise UserError(f"{path}: no such profile") from None
        except ValidationError as error:
            raise UserError(f"{path}: not a profile: {describe(error)}") from None


def _counts(counts: Counts | Mapping[str, int]) -> Counts:
    return counts if isinstance(counts, Counts) else Counts(**counts)


def _width(counts: Counts) -> float:
    """Mean tokens a verification feeds."""
    return 1 + counts.n_drafted / max(counts.n_target, 1)


def latency(
    t_draft: float, t_target: float, discard_rate: float, verification_rate: float
) -> float:
    """SpecDec++, Eq. 5.1: seconds a token."""
    return t_draft + t_draft * discard_rate + (t_target - t_draft) * verification_rate


def improvement_factor(alpha: float, gamma: int, c: float) -> float:
    """Leviathan et al. (2023), Thm 3.8: expected speedup of `gamma` candidates a round when each
    is accepted with probability `alpha` and a draft forward costs `c` target forwards."""
    expected = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
    return expected / (gamma * c + 1)


def identity_gap(counts: Counts) -> int:
    """How far counts are from Lemma 3.1's identity N_draft + N_target = N + N_discarded.

    0 for every chain whose tokens each cost one draft forward. A verification whose own token is
    thrown away, because the request ended on an accepted token (EOS, a stop string), added
    nothing to N and is allowed for. Drafters that get tokens without a forward are below 0.
    """
    wasted = counts.n_target - counts.n_target_tokens
    return counts.n_draft + counts.n_target - wasted - counts.n - counts.n_discarded


def oracle_counts(disagreements: Sequence[int], lengths: Sequence[int]) -> Counts:
    """SpecDec++, Thm 4.1: a draft that always stops just before its next rejection.

    For each prompt, `disagreements` is |S|, the greedy positions at which draft and target differ,
    and `lengths` is N. N_target = |S| + 1 (at most N), N_discarded = 0, and every other token is
    drafted and accepted.
    """
    n = n_target = 0
    for differing, length in zip(disagreements, lengths, strict=True):
        if not 0 <= differing <= length:
            raise ValueError(f"{differing} disagreements in {length} tokens")
        n += length
        n_target += min(differing + 1, length)
    drafted = n - n_target
    return Counts(
        requests=len(lengths),
        n=n,
        n_draft=drafted,
        n_target=n_target,
        n_discarded=0,
        n_drafted=drafted,
        n_accepted=drafted,
        n_target_tokens=n_target,
    )


@dataclass(frozen=True)
class ForwardTimes:
    """Effective forward seconds in real runs."""

    t_draft: float
    t_target: float
    r2: float


def regress_forward_times(runs: Iterable[tuple[int, int, float]]) -> ForwardTimes:
    """SpecDec++, §5.2: (t_draft, t_target) from (N_draft, N_target, T_total) of real runs, by
    least squares on Eq. 3.1 without an intercept. T_total is in seconds, without prefill."""
    table = np.array(list(runs), dtype=float).reshape(-1, 3)
    passes, seconds = table[:, :2], table[:, 2]
    if np.linalg.matrix_rank(passes) < passes.any(axis=0).sum() or not passes.any():
        raise ValueError("runs too alike to tell the draft's time from the target's")
    times = nonnegative_least_squares(passes, seconds)
    return ForwardTimes(*times, r2=r_squared(seconds, passes @ np.array(times)))


def nonnegative_least_squares(columns: np.ndarray, values: np.ndarray) -> list[float]:
    """argmin over x ≥ 0 of |columns·x − values|², for a handful of columns.

    The solution is the plain least-squares solution over its own non-zero columns, so it is the
    best non-negative one among all subsets; smaller subsets win ties, which also settles columns
    that the measurements cannot tell apart.
    """
    count = columns.shape[1]
    # Columns differ by orders of magnitude (1 against context · batch).
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1
    scaled = columns / scale
    best, least = np.zeros(count), float(values @ values)
    tolerance = 1e-9 * least
    for size in range(1, count + 1):
        for subset in map(list, combinations(range(count), size)):
            found = np.linalg.lstsq(scaled[:, subset], values, rcond=None)[0]
            residual = float(np.square(scaled[:, subset] @ found - values).sum())
            if (found >= 0).all() and residual < least - tolerance:
                best, least = np.zeros(count), residual
                best[subset] = found
    return (best / scale).tolist()


def r_squared(values: np.ndarray, predicted: np.ndarray) -> float:
    """Share of the variance of `values` that is explained; 1 when there is none."""
    spread = float(np.square(values - values.mean()).sum())
    residual = float(np.square(values - predicted).sum())
    return 1 - residual / spread if spread else float(np.isclose(residual, 0))
