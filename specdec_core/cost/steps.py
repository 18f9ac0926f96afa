"""Seconds of an engine step over many requests.

A step feeds the target one sequence in which rows of any length are packed: decoding rows with
their candidates, and chunks of prompts. Before that, drafts propose in forwards that all drafting
rows share. A row costs what its own tokens and its own context cost, so the time of a forward is a
function of sums over its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.config import CANDIDATES, PairSpec, Value, load_yaml, parse
from specdec_core.cost.fitting import nonnegative_least_squares, r_squared
from specdec_core.cost.forward import ForwardCost
from specdec_core.cost.hardware import Hardware
from specdec_core.cost.profile import Profile

FEW = 16  # tokens of a row that, up to fewer than these, read keys and values for few queries

_CONTEXT = 256  # tokens in the cache, for a cost without a context

# Tokens of a forward from which on arithmetic may dominate; a fit chooses one of them.
_KNEES = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512)


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


class PackedForward(Value):
    """A forward over packed rows, measured."""

    rows: int
    tokens: int
    cached: int
    pairs: float
    few_pairs: float = 0
    seconds: float

    @property
    def work(self) -> Work:
        return Work(self.rows, self.tokens, self.cached, self.pairs, self.few_pairs)


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
    def fit(cls, measured: Sequence[PackedForward]) -> ForwardTerms:
        """Non-negative least squares of the relative error, with the knee that fits best. Raises
        ValueError without measurements."""
        if not measured:
            raise ValueError("no measurements to fit")
        seconds = np.array([m.seconds for m in measured])
        work = np.array([m.work for m in measured], dtype=float)
        best, least = cls(), np.inf
        for knee in (0, *_KNEES):
            beyond = np.maximum(work[:, 1] - knee, 0) if knee else np.zeros(len(work))
            columns = np.column_stack([np.ones(len(work)), work, beyond]) / seconds[:, None]
            terms = nonnegative_least_squares(columns, np.ones(len(seconds)))
            error = float(np.square(columns @ terms - 1).sum())
            if error < least * (1 - 1e-6):
                names = [name for name in cls.model_fields if name != "knee"]
                values: dict[str, Any] = dict(zip(names, terms, strict=True))
                best, least = cls(**values, knee=knee), error
        return best

    def seconds(self, work: Work) -> float:
        return (
            self.fixed
            + self.per_row * work.rows
            + self.per_token * work.tokens
            + self.per_cached * work.cached
            + self.per_pair * work.pairs
            + self.per_few_pair * work.few_pairs
            + self.per_token_beyond * max(work.tokens - self.knee, 0)
        )


class EngineWork(NamedTuple):
    """What the engine does in a step beside forwards."""

    rows: int = 0  # that decode
    draft_forwards: int = 0
    candidates: int = 0  # that are verified
    lookups: int = 0  # rows with a lookup
    read: int = 0  # tokens of prompts
    entering: int = 0  # requests that enter a slot


class EngineTerms(Value):
    """Seconds that the engine adds to the forwards of a step: `per_step`, and for each part of its
    :class:`EngineWork`."""

    per_step: float = Field(default=0.0, ge=0)
    per_row: float = Field(default=0.0, ge=0)
    per_draft_forward: float = Field(default=0.0, ge=0)
    per_candidate: float = Field(default=0.0, ge=0)
    per_lookup: float = Field(default=0.0, ge=0)
    per_read: float = Field(default=0.0, ge=0)
    per_entering: float = Field(default=0.0, ge=0)

    @classmethod
    def fit(cls, works: Sequence[EngineWork], seconds: Sequence[float]) -> EngineTerms:
        """From the `seconds` of steps without their forwards. Steps with the same work count by
        their median, so that few slow steps do not matter. Errors are relative; the error of n
        equal steps has the weight √n, because their median is known that much better."""
        alike: dict[EngineWork, list[float]] = {}
        for work, each in zip(works, seconds, strict=True):
            alike.setdefault(work, []).append(each)
        values = np.array([max(float(np.median(each)), 0.0) for each in alike.values()])
        scale = np.maximum(values, max(float(np.median(values)) / 4, 1e-9))
        columns = np.column_stack([np.ones(len(values)), np.array(list(alike), dtype=float)])
        weights = np.sqrt([len(each) for each in alike.values()]) / scale
        terms = nonnegative_least_squares(columns * weights[:, None], values * weights)
        return cls(**dict(zip(cls.model_fields, terms, strict=True)))

    def seconds(self, work: EngineWork) -> float:
        return (
            self.per_step
            + self.per_row * work.rows
            + self.per_draft_forward * work.draft_forwards
            + self.per_candidate * work.candidates
            + self.per_lookup * work.lookups
            + self.per_read * work.read
            + self.per_entering * work.entering
        )


class StepTimes(Value):
    """The times of a pair's steps on one machine."""

    target: ForwardTerms = Field(description="in steps in which a draft model proposes")
    alone: ForwardTerms | None = Field(
        default=None, description="the target's in other steps; unset, the same"
    )
    autoregressive: ForwardTerms | None = Field(
        default=None, description="… in those without candidates; unset, the same"
    )
    drafts: dict[str, ForwardTerms] = Field(default={})
    engine: EngineTerms = EngineTerms()
    device: str = "unknown"
    mixes: bool = Field(
        default=True, description="whether a forward has prompts and candidates together"
    )
    pair: PairSpec | None = Field(default=None, description="whose steps were measured")
    fingerprints: dict[str, str] = Field(default={}, description="of the models' weights")
    machine: dict[str, str] = Field(default={}, description="where they were measured")
    slots: int | None = Field(
        default=None, ge=1, description="the most requests together that were measured"
    )

    def foreign_to(
        self,
        pair: PairSpec,
        slots: int,
        fingerprints: Mapping[str, str] | None = None,
        machine: Mapping[str, str] | None = None,
    ) -> str | None:
        """The first difference between what was measured and `slots` slots of a pair, with weights
        of these fingerprints, on this machine; None where there is none, or none is known."""
        if self.pair is not None:
            measured, asked = _settings(self.pair), _settings(pair)
            for name, value in asked.items():
                # What is automatic on one side is settled on the other.
                if "auto" not in (value, known := measured.get(name, "none")) and value != known:
                    return f"{name} {known}, not {value}"
        if self.slots is not None and slots > self.slots:
            return f"up to {self.slots} slots, not {slots}"
        if self.machine and machine is not None:
            for name in {**self.machine, **machine}:
                measured_on, here = (each.get(name, "none") for each in (self.machine, machine))
                if measured_on != here:
                    return f"{name} {measured_on}, not {here}"
        for name, weights in (fingerprints or {}).items():
            if self.fingerprints.get(name, weights) != weights:
                return f"other weights of {name}"
        return None

    def verifying(self, drafting: bool, candidates: bool = True) -> ForwardTerms:
        """The target's, after forwards of a draft or without, and with candidates or without."""
        if drafting:
            return self.target
        if not candidates and self.autoregressive is not None:
            return self.autoregressive
        return self.target if self.alone is None else self.alone

    def draft(self, name: str | None = None) -> ForwardTerms:
        """A draft's; None is the first. Raises :class:`UserError` for one without times."""
        chosen = next(iter(self.drafts), None) if name is None else name
        if chosen is None or chosen not in self.drafts:
            there = ", ".join(self.drafts) or "none"
            raise UserError(f"no step times of draft {name or '(any)'} (there are: {there})")
        return self.drafts[chosen]

    def target_cost(self, draft: str | None = None) -> float:
        """A step's target forward in drafting steps, for one request; see
        :meth:`specdec_core.cost.Profile.target_cost`."""
        work, engine = Work.of([(1, _CONTEXT)]), self.engine
        idle = engine.seconds(EngineWork(rows=1))
        drafting = self.draft(draft).seconds(work) + engine.per_draft_forward
        return float(f"{(self.verifying(True).seconds(work) + idle) / drafting:.3g}")

    def target_in_candidates(self, draft: str | None = None) -> float:
        """The same in what a candidate takes; see
        :meth:`specdec_core.cost.Profile.target_in_candidates`."""
        alone, more = (Work.of([(n, _CONTEXT)]) for n in (1, 1 + CANDIDATES))
        target, engine = self.verifying(True), self.engine
        place = max(target.seconds(more) - target.seconds(alone), 0.0) / CANDIDATES
        drafting = self.draft(draft).seconds(alone) + engine.per_draft_forward
        seconds = target.seconds(alone) + engine.seconds(EngineWork(rows=1))
        return float(f"{seconds / (drafting + place):.3g}")

    @classmethod
    def of(cls, profile: Profile) -> StepTimes:
        """From a profile. Its forwards have rows of one width and one context. Where it has the
        target's forward of decoding without drafting, steps without candidates cost that."""
        overhead, alone = profile.draft_overhead.values(), profile.autoregressive_forward
        return cls(
            target=_of_cost(profile.target),
            autoregressive=None if alone is None else ForwardTerms(fixed=alone),
            drafts={name: _of_cost(cost) for name, cost in profile.drafts.items()},
            engine=EngineTerms(
                per_step=profile.round_overhead,
                per_draft_forward=sum(overhead) / len(overhead) if overhead else 0.0,
            ),
            device=profile.device,
        )

    def save(self, path: str | Path) -> Path:
        return write_atomically(Path(path), self.model_dump_json(indent=1) + "\n")


def _settings(pair: PairSpec) -> dict[str, str]:
    """What the times of a pair's steps depend on, by name."""
    drafts = {f"draft {name}": model for name, model in pair.drafts.items()}
    runner = {name: str(value) for name, value in pair.runner.model_dump().items()}
    return {"target": pair.target, **drafts, **runner}


def load_step_times(path: str | Path, drafts: Sequence[str]) -> StepTimes:
    """The step times in a file (YAML or JSON): :class:`StepTimes`, or another machine's
    forward times (:mod:`specdec_core.cost.hardware`), which are the same whatever is fed in. Raises
    :class:`UserError`."""
    content = load_yaml(path)
    target = content.get("target") if isinstance(content, Mapping) else None
    if isinstance(target, Mapping) and not {"speculative", "alone"} & target.keys():
        times = parse(StepTimes, content, str(path))
        for draft in drafts:
            if draft not in times.drafts:
                there = ", ".join(times.drafts) or "none"
                raise UserError(f"{path}: drafts.{draft}: no times given (there are: {there})")
        return times
    hardware = parse(Hardware, content, str(path))
    hardware._source = str(path)
    return StepTimes.of(hardware.profile(list(drafts)))


def _of_cost(cost: ForwardCost) -> ForwardTerms:
    return ForwardTerms.fit(
        [
            PackedForward(seconds=m.seconds, **Work.of([(m.width, m.context)] * m.batch)._asdict())
            for m in cost.measurements
        ]
    )


def fit_quality(terms: ForwardTerms, measured: Sequence[PackedForward]) -> tuple[float, float]:
    """R² of a fit, and its median relative error."""
    seconds = np.array([m.seconds for m in measured])
    fitted = np.array([terms.seconds(m.work) for m in measured])
    return r_squared(seconds, fitted), float(np.median(np.abs(fitted / seconds - 1)))
