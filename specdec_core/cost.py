"""What forward passes cost, and what counts of forward passes therefore cost.

N_draft, N_target and N_discarded say how much work a configuration does and do not depend on the
hardware; a :class:`Profile` says what that work costs here. Together they predict the time of any
configuration (SpecDec++, Eq. 3.1, 3.2 and 5.1) without running it. All times are seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from specdec_core.config import (
    AUTOREGRESSIVE,
    Configuration,
    DraftModelDrafter,
    FixedPolicy,
    describe,
)
from specdec_core.errors import UserError
from specdec_core.files import write_atomically
from specdec_core.stats import Counts, Round

if TYPE_CHECKING:
    from specdec_core.pair import Pair
    from specdec_core.runner import ModelRunner


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measurement(_Value):
    """One forward, measured: `batch` rows of `width` new tokens after `context` cached ones."""

    width: int
    context: int
    batch: int
    seconds: float  # median over the repeats


class Terms(_Value):
    """t(n, c, b) = fixed + per_token · n·b + per_cached · c·b + per_pair · n·c·b  for width n,
    context c and batch b.

    The weights are read once whatever is fed in (fixed), the layers' arithmetic grows with the
    tokens fed in, reading keys and values with the tokens cached, and attention's arithmetic with
    the pairs of both. No coefficient is negative: more work is never faster, also where the fit
    extrapolates. Affine in n, so many rounds take what as many rounds of their mean width take.
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
        found = nonnegative_least_squares(columns / seconds[:, None], np.ones(len(seconds)))
        return cls(**dict(zip(cls.model_fields, found, strict=True)))

    def seconds(self, width: float, context: float, batch: int) -> float:
        products = _products(width, context, batch)
        coefficients = (self.fixed, self.per_token, self.per_cached, self.per_pair)
        return float(sum(c * p for c, p in zip(coefficients, products, strict=True)))


def _products(width: Any, context: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
    return batch / batch, width * batch, context * batch, width * context * batch


class Kind(StrEnum):
    """Forwards that run different kernels."""

    TOKEN = "token"  # one token of one row: matrix-vector products
    ROWS = "rows"  # one token of each of several rows: attention of single queries
    WIDE = "wide"  # several tokens a row

    @classmethod
    def of(cls, width: float, batch: int) -> Kind:
        return cls.WIDE if width > 1 else cls.ROWS if batch > 1 else cls.TOKEN


# Which kind stands in, in this order, for one that was not measured.
_STAND_IN = {
    Kind.TOKEN: (Kind.TOKEN, Kind.ROWS, Kind.WIDE),
    Kind.ROWS: (Kind.ROWS, Kind.WIDE, Kind.TOKEN),
    Kind.WIDE: (Kind.WIDE, Kind.ROWS, Kind.TOKEN),
}


class ForwardCost(_Value):
    """Forward seconds of one model as a function of width, context and batch.

    The kinds of forward are fitted apart: less work can take longer where it runs other kernels
    (on a CPU one token is often slower than two).
    """

    measurements: list[Measurement]
    terms: dict[Kind, Terms]
    r2: float

    @classmethod
    def fit(cls, measurements: Sequence[Measurement]) -> ForwardCost:
        """Fit each kind that was measured. Raises ValueError without measurements."""
        if not measurements:
            raise ValueError("no measurements to fit")
        groups: dict[Kind, list[Measurement]] = {}
        for m in measurements:
            groups.setdefault(Kind.of(m.width, m.batch), []).append(m)
        terms = {kind: Terms.fit(group) for kind, group in groups.items()}
        fitted = cls(measurements=list(measurements), terms=terms, r2=0.0)
        seconds = np.array([m.seconds for m in measurements])
        predicted = np.array([fitted.seconds(m.width, m.context, m.batch) for m in measurements])
        return fitted.model_copy(update={"r2": r_squared(seconds, predicted)})

    @property
    def typical_context(self) -> float:
        """The median context measured: what `seconds` assumes when it is told none."""
        return statistics.median(m.context for m in self.measurements)

    @property
    def worst_error(self) -> float:
        """Largest relative deviation of the fit from a measurement."""
        return max(
            abs(self.seconds(m.width, m.context, m.batch) / m.seconds - 1)
            for m in self.measurements
        )

    def seconds(self, width: float = 1, context: float | None = None, batch: int = 1) -> float:
        """Seconds of one forward. `width` may be a mean over forwards; one between 1 and 2 is a
        mixture of both."""
        context = self.typical_context if context is None else context
        if 1 < width < 2:
            one, two = self.seconds(1, context, batch), self.seconds(2, context, batch)
            return one + (width - 1) * (two - one)
        kind = next(k for k in _STAND_IN[Kind.of(width, batch)] if k in self.terms)
        return self.terms[kind].seconds(width, context, batch)


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
        if draft not in self.drafts:
            raise ValueError(
                f"no draft {draft!r} in the profile (it has: {', '.join(self.drafts)})"
            )
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
        1 + drafted on average. A batch shares each forward among its rows, taken to be all busy.
        Prefill is not included.
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


# --- measuring ----------------------------------------------------------------------------------
# The engine is imported where it is used: reading a profile needs neither torch nor transformers.

WIDTHS = (1, 2, 3, 5, 8, 12, 16)
CONTEXTS = (64, 256, 512)
BATCHES = (1, 2, 4)  # two above 1, to tell a row's cost from the fixed one


def profile_pair(
    pair: Pair,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] = BATCHES,
    repeats: int = 7,
    on_step: Callable[[int, int], None] | None = None,
) -> Profile:
    """Measure forwards of every model of `pair` at every width, context and batch, fit them, and
    measure what the engine adds.

    The models take turns within a repeat, so that a change of the machine's load falls on all of
    them alike; a measurement is the median of its repeats. Contexts unset are :data:`CONTEXTS` as
    far as the pair can hold them. `on_step(done, total)` is called after every repeat. Sizes that
    are not positive or do not fit are a :class:`UserError`.
    """
    from specdec_core.runner import ModelRunner

    room = pair.max_length - max(widths)
    if contexts is None:
        contexts = [context for context in CONTEXTS if context <= room] or [max(room, 1)]
    for name, sizes in (("widths", widths), ("contexts", contexts), ("batches", batches)):
        if min(sizes) < 1:
            raise UserError(f"profile {name} must be at least 1 (got {min(sizes)})")
    if max(contexts) > room:
        raise UserError(
            f"{max(widths)} tokens after a context of {max(contexts)} are more than the"
            f" {pair.max_length} that the pair can hold"
        )
    if repeats < 1:
        raise UserError(f"profile repeats must be at least 1 (got {repeats})")

    models = {_TARGET: pair.target, **pair.drafts}
    runners = {
        name: ModelRunner(model, max(batches), pair.max_length) for name, model in models.items()
    }
    shapes = [(width, batch) for batch in sorted(set(batches)) for width in sorted(set(widths))]
    measured: dict[str, list[Measurement]] = {name: [] for name in runners}
    done, total = 0, len(set(contexts)) * (repeats + 1)
    for context in sorted(set(contexts)):
        samples = {(name, *shape): [] for name in runners for shape in shapes}
        for runner in runners.values():
            _fill(runner, context)
        for _ in range(repeats + 1):
            for name, runner in runners.items():
                _time_forward(runner, *shapes[-1])  # its weights are back in the caches
                for shape in shapes:
                    samples[name, *shape].append(_time_forward(runner, *shape))
            done += 1
            if on_step:
                on_step(done, total)
        for (name, width, batch), times in samples.items():
            seconds = statistics.median(times[1:])  # the first one warmed up
            measured[name].append(
                Measurement(width=width, context=context, batch=batch, seconds=seconds)
            )
    costs = {name: ForwardCost.fit(measurements) for name, measurements in measured.items()}
    profile = Profile(
        target=costs.pop(_TARGET),
        drafts=costs,
        device=str(pair.target.device),
        target_dtype=_dtype(pair.target),
        draft_dtype=_dtype(next(iter(pair.drafts.values()), pair.target)),
        threads=pair.spec.runner.threads,
    )
    return profile.model_copy(update=_overheads(profile, pair))


_TARGET = "\0target"  # beside the drafts' names, which people choose


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _fill(runner: ModelRunner, context: int) -> None:
    """Bring every row to `context` cached tokens; which ones does not change a forward's time."""
    missing = [[1] * (context - length) for length in runner.lengths]
    runner.prefill(range(len(missing)), missing)


def _time_forward(runner: ModelRunner, width: int, batch: int) -> float:
    lengths = runner.lengths[:batch]
    start = time.perf_counter()
    logits = runner.forward(range(batch), [[1] * width] * batch)
    logits[0, 0, 0].item()  # waits for the device
    seconds = time.perf_counter() - start
    for row, length in enumerate(lengths):
        runner.truncate(row, length)
    return seconds


def _overheads(profile: Profile, pair: Pair, repeats: int = 3) -> dict[str, Any]:
    """`round_overhead` and `draft_overhead` from short runs of the engine.

    A round's is what autoregressive rounds take beyond their forwards; a drafting step's is what
    remains of drafting rounds after all forwards and the rounds' overhead.
    """
    from specdec_core.engine import Engine, Request

    prompt = min(64, pair.max_length // 2)
    tokens = min(32, pair.max_length // 2)
    request = Request("profile", (1,) * prompt, tokens, ignore_eos=True)
    policy = FixedPolicy(max_tokens=4)
    runs = {_TARGET: AUTOREGRESSIVE} | {
        name: Configuration(drafter=DraftModelDrafter(draft=name, policy=policy))
        for name in profile.drafts
    }
    engine = Engine(pair)
    rounds: dict[str, list[Round]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, configuration in runs.items():
            engine.configure(configuration)
            (generation,) = engine.generate([request])
            rounds[name] += generation.rounds
    context = prompt + tokens / 2

    def beyond_target(r: Round) -> float:
        seconds = r.draft_seconds + r.target_seconds + r.other_seconds
        return seconds - profile.t_target(1 + r.drafted, context)

    # A median over rounds, because what disturbs the machine falls on some of them.
    per_round = max(statistics.median(map(beyond_target, rounds.pop(_TARGET))), 0.0)
    per_draft = {
        name: statistics.median(
            (beyond_target(r) - per_round) / r.draft_forwards for r in own if r.draft_forwards
        )
        - profile.t_draft(name, context)
        for name, own in rounds.items()
    }
    return {
        "round_overhead": per_round,
        "draft_overhead": {name: max(seconds, 0.0) for name, seconds in per_draft.items()},
    }
