"""The measurements behind the papers' tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property
from itertools import product
from typing import Any, ClassVar, get_args

import numpy as np
from pydantic import Field

from research.frames import Rows, framed
from research.papers.near_ties import FirstDifference
from research.papers.plan import Method, PaperPlan, Quantity, Table
from specdec_core.config import Configuration, Document, PairSpec, Stored
from specdec_core.cost.fitting import nonnegative_least_squares, r_squared
from specdec_core.prompts.prompt_sets import PromptSet
from specdec_core.search.results import Timing
from specdec_core.tokens.statistics import OF_THE_TARGET, Counts, Generation

FORWARDS = ("n_draft", "n_target")
MOST_CONDITION = 300.0  # of a regression's columns, each of length 1
WIDEST = 0.5  # half of a time's 95 % interval, as a part of it
T_95 = 2.0  # deviations of half a 95 % interval, with some thirty decodings


def path_rate(generations: Iterable[Generation], depth: int) -> float:
    """α of improved MCSD: drafted tokens of the longest accepted path over the maximum `depth` of
    the method's drafts, over all rounds but a request's first, which has no candidates. A token
    that the target drew to begin a tree counts on neither side. At the end of a request only the
    remaining room counts as possible."""
    accepted = possible = 0
    for generation in generations:
        accepted += sum(origin not in OF_THE_TARGET for origin in generation.origins)
        length = len(generation.tokens)
        cut = generation.finish_reason == "length"
        possible += sum(
            min(depth, length - r.position - 1) if cut else depth for r in generation.rounds[1:]
        )
    return accepted / possible if possible else 0.0


class Measured(Document):
    """A configuration on a prompt set. `timing`, against autoregressive decoding with the same
    sampling, where a table shows a time."""

    prompts: str
    configuration: Configuration
    counts: dict[str, int]
    metrics: dict[str, float]
    forwards: dict[str, list[int]] = Field(default={})  # n_draft and n_target of each prompt
    timing: Timing | None = None

    @classmethod
    def of(
        cls,
        prompts: str,
        configuration: Configuration,
        generations: Sequence[Generation],
        timing: Timing | None,
    ) -> Measured:
        counts = Counts.of(generations)
        metrics = counts.metrics()
        if configuration.drafter is None:
            metrics = {name: metrics[name] for name in ("mat", "verification_rate")}
        else:
            metrics["path_rate"] = path_rate(generations, configuration.drafter.depth)
            metrics["accepted_per_round"] = counts.n_accepted / max(counts.n_target, 1)
            if not counts.n_draft:
                del metrics["utilisation"]  # of a draft model
        if timing is not None:
            metrics["tokens_per_second"] = timing.tokens_per_second
            metrics["speedup"] = timing.speedup
        return cls(
            prompts=prompts,
            configuration=configuration,
            counts=counts.as_dict(),
            metrics=metrics,
            forwards={
                name: [getattr(Counts.of([each]), name) for each in generations]
                for name in FORWARDS
            },
            timing=timing,
        )


class PapersResult(Stored):
    """All measurements of a plan's tables."""

    FILE: ClassVar[str] = "papers.json"
    WHAT: ClassVar[str] = "result of the papers"

    name: str
    started: datetime
    plan: PaperPlan
    pair: PairSpec  # with concrete data types
    sets: dict[str, PromptSet]
    measured: list[Measured]
    environment: dict[str, str] = Field(default={})
    target_costs: dict[str, float] = Field(
        default={}, description="a target forward in steps of a draft, where a policy asks for it"
    )
    differences: list[FirstDifference] = Field(default=[])

    def tables(self) -> dict[str, Table]:
        """The tables with at least one measured prompt set."""
        return {key: table for key, table in self.plan.tables.items() if self.sets_of(table)}

    def sets_of(self, table: Table) -> list[str]:
        """The prompt sets of a table that were measured."""
        return [name for name in table.prompts if name in self.sets]

    def find(self, prompts: str, configuration: Configuration) -> Measured | None:
        """The measurement of `configuration` on a set; None where there is none."""
        return self._index.get((prompts, configuration))

    def timing(self, prompts: str, configuration: Configuration) -> Timing | None:
        """The times of :meth:`find`, where there are any."""
        measured = self.find(prompts, configuration)
        return None if measured is None else measured.timing

    def value(self, prompts: str, configuration: Configuration, quantity: Quantity) -> float:
        """One quantity of :meth:`find`; NaN where there is none."""
        measured = self.find(prompts, configuration)
        return math.nan if measured is None else measured.metrics.get(quantity, math.nan)

    @framed
    def frame(self, key: str) -> Rows:
        """A table's numbers, one row for each method, prompt set and value of the varied parameter:
        every measured quantity, the speedup's interval, the counts."""
        table = self.plan.tables[key]
        for method in self.plan.methods(key):
            for number, configuration in enumerate(method.configurations):
                for prompts in self.sets_of(table):
                    if (measured := self.find(prompts, configuration)) is not None:
                        yield _row(table, method, number, measured)

    @framed
    def forward_times(self, key: str) -> Rows:
        """Seconds of a forward by regression over all decodings of a table (SpecDec++, §5.2 and
        Table 2): T = t_draft·N_draft + t_target·N_target + what a prompt costs, for each prompt set
        and family of configurations. Columns prompts, setting, t_draft and t_target (seconds),
        decodings, r2, refused; autoregressive decoding is the stand-alone target. Times that the
        decodings do not determine are NaN, and `refused` is the reason."""
        methods = self.plan.methods(key)
        configurations = list(dict.fromkeys(c for m in methods for c in m.configurations))
        alone = dict.fromkeys(Configuration(sampling=c.sampling) for c in configurations)
        for prompts in self.sets_of(self.plan.tables[key]):
            families: dict[str, list[Measured]] = {}
            for configuration in (*alone, *configurations):
                measured = self.find(prompts, configuration)
                if measured is not None and measured.timing is not None and measured.forwards:
                    families.setdefault(configuration.family, []).append(measured)
            yield from (_regressed(prompts, *family) for family in families.items())

    @framed
    def throughputs(self, key: str) -> Rows:
        """How well :meth:`forward_times` predict throughputs (SpecDec++, App. D.2): a row a prompt
        set and drafting configuration of a table with its family's times: tokens a second
        `measured` and `predicted`, and the relative `error` of the prediction."""
        times = {
            (row["prompts"], row["setting"]): row for _, row in self.forward_times(key).iterrows()
        }
        for method in self.plan.methods(key):
            for prompts, configuration in product(
                self.sets_of(self.plan.tables[key]), method.configurations
            ):
                measured = self.find(prompts, configuration)
                row = times.get((prompts, configuration.family))
                if row is None or row["refused"] or not configuration.drafter:
                    continue
                if measured is None or measured.timing is None:
                    continue
                n_draft, n_target = (np.array(measured.forwards[name]) for name in FORWARDS)
                seconds = row["t_draft"] * n_draft + row["t_target"] * n_target + row["once"]
                predicted = sum(measured.timing.tokens) / seconds.sum()
                taken = np.median(measured.timing.seconds, axis=0).sum()
                real = sum(measured.timing.tokens) / taken
                yield {
                    "prompts": prompts,
                    "method": method.name,
                    "measured": real,
                    "predicted": predicted,
                    "error": abs(predicted / real - 1),
                }

    @cached_property
    def _index(self) -> dict[tuple[str, Configuration], Measured]:
        return {(m.prompts, m.configuration): m for m in self.measured}


def _regressed(prompts: str, family: str, measured: Sequence[Measured]) -> dict[str, Any]:
    """The forward times of a family of configurations on a prompt set."""
    forwards = [np.concatenate([m.forwards[name] for m in measured]) for name in FORWARDS]
    seconds = np.concatenate([np.median(m.timing.seconds, axis=0) for m in measured if m.timing])
    columns = np.stack([*forwards, np.ones(len(seconds))], axis=1).astype(float)
    return {"prompts": prompts, "setting": family, **regression(columns, seconds)}


def regression(columns: np.ndarray, seconds: np.ndarray) -> dict[str, Any]:
    """The regression of `seconds` (n,) on draft forwards, target forwards and a constant, the
    `columns` (n, 3): `t_draft`, `t_target`, `once`, `r2` and the number of `decodings`. Times are
    NaN, with the reason in `refused`, where decodings are too few, or too much alike, to
    determine them."""
    used = columns.any(axis=0)
    refused = _undetermined(columns[:, used], seconds)
    solution = np.array(nonnegative_least_squares(columns, seconds))
    times = np.full(3, math.nan) if refused else np.where(used, solution, math.nan)
    return {
        **dict(zip(("t_draft", "t_target", "once"), times.tolist(), strict=True)),
        "r2": math.nan if refused else r_squared(seconds, columns @ solution),
        "decodings": len(seconds),
        "refused": refused,
    }


def _undetermined(columns: np.ndarray, seconds: np.ndarray) -> str:
    """Why a regression on `columns`, of which the last is the constant, does not determine the
    forward times; empty where it does."""
    freedom = len(seconds) - columns.shape[1]
    if freedom < 1 or np.linalg.matrix_rank(columns) < columns.shape[1]:
        return "too few or equal decodings"
    condition = np.linalg.cond(columns / np.linalg.norm(columns, axis=0))
    if condition > MOST_CONDITION:
        return f"counts are nearly collinear (condition {condition:,.0f})"
    solution, residuals, *_ = np.linalg.lstsq(columns, seconds, rcond=None)
    noise = residuals.sum() / freedom
    deviations = np.sqrt(noise * np.diag(np.linalg.inv(columns.T @ columns)))
    half_widths = T_95 * deviations[:-1] / np.maximum(solution[:-1], 1e-12)
    if half_widths.max() > WIDEST:
        return f"the 95 % interval of a time is ±{min(half_widths.max(), 9.99):.0%}"
    return ""


def _row(table: Table, method: Method, number: int, measured: Measured) -> dict[str, Any]:
    timing, configuration = measured.timing, measured.configuration
    return {
        "method": method.label,
        "prompts": measured.prompts,
        **({table.varied: table.values[number]} if table.varied else {}),
        "temperature": configuration.sampling.temperature,
        "lossless": configuration.lossless,
        **{name: measured.metrics.get(name, math.nan) for name in get_args(Quantity)},
        "speedup_low": timing.low if timing else math.nan,
        "speedup_high": timing.high if timing else math.nan,
        "differing_outputs": timing.differing_outputs if timing else math.nan,
        **measured.counts,
        "configuration": configuration.label,
        "config_id": configuration.id,
    }
