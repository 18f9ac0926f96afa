"""What was chosen for each load, and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd
from pydantic import Field

from specdec_core.config import Configuration, Document, distinct_labels
from specdec_core.search.load.measures import LoadMeasures
from specdec_core.search.load.workload import Load, Objective, Slo
from specdec_core.tokens.statistics import Ratio

# What is simulated and measured alike, by the column of its error: measure and percentile.
CHECKED = {"tpot": ("tpot", 50), "ttft": ("ttft", 95)}


class Compared(Document):
    """A configuration at a load: simulated, and live in each turn of it. `speedup` is how many
    times as good as autoregressive decoding it is by the objective, measured with its interval, or
    without one by simulation; None where that reaches nothing."""

    load: Load
    config_id: str
    simulated: LoadMeasures
    live: list[LoadMeasures] = Field(default=[])
    speedup: float | None
    low: float | None = None
    high: float | None = None

    @property
    def typical(self) -> LoadMeasures | None:
        """The live run of median length; None where nothing was timed."""
        runs = sorted(self.live, key=lambda run: run.seconds)
        return runs[len(runs) // 2] if runs else None

    @property
    def known(self) -> LoadMeasures:
        """What is known best: the typical live run, else the simulated one."""
        return self.typical or self.simulated


class LoadVerdict(Document):
    """The choice for one load. Costs are shares of what the best timed there reaches by the
    objective; None where nothing was timed."""

    load: Load
    config_id: str
    in_question: list[str] = Field(default=[])  # that none timed there is shown to be better than
    regret: float | None = None  # what the choice is expected to cost, …
    low: float | None = None  # … with its interval, …
    at_most: float | None = None  # … and what it costs at most (95 %)


class LoadChoice(Document):
    """A configuration for each load, `chosen` for all of them together, and what was compared."""

    by: Objective
    slo: Slo | None = None
    chosen: Configuration
    configurations: list[Configuration]  # that rows are of, autoregressive decoding first
    rows: list[Compared]
    verdicts: list[LoadVerdict]
    simulated: int  # configurations, …
    pace: float | None = None  # … and the simulation's speed, as a multiple of an engine's
    # Of `configurations`, by id: simulated from rounds that were decoded live, not replayed.
    decoded: list[str] = Field(default=[])

    @property
    def timed(self) -> bool:
        """Whether it was chosen by live runs, not by simulation alone."""
        return any(row.live for row in self.rows)

    @property
    def labels(self) -> dict[str, str]:
        """The configurations' labels by id."""
        return distinct_labels(self.configurations)

    def row(self, load: Load, config_id: str) -> Compared:
        return next(r for r in self.rows if (r.load, r.config_id) == (load, config_id))

    def unkept(self, load: Load) -> Compared | None:
        """Where no configuration keeps the objective for any request at a load, the nearest one:
        its 95th percentiles exceed their limits by the least factor. Else None."""
        rows = [row for row in self.rows if row.load == load]
        if self.slo is None or any(row.known.good_share for row in rows):
            return None
        limits = self.slo.limits.items()

        def excess(row: Compared) -> float:
            measured = ((getattr(row.known, name), limit) for name, limit in limits)
            return max(
                (values[95] / limit for values, limit in measured if values), default=math.inf
            )

        return min(rows, key=excess)

    def served(self) -> dict[Load, Compared]:
        """What is served, at each load: also a schedule is compared as a whole."""
        return {v.load: self.row(v.load, self.chosen.id) for v in self.verdicts}

    def table(self) -> pd.DataFrame:
        """One row a load and configuration: live and simulated (`_simulated`) `value` by the
        objective, `tpot` (median) and `ttft` (95th percentile), the simulation's relative errors
        (`_error`), whether it was simulated from rounds `decoded_live`, and the `speedup` over
        autoregressive decoding from `low` to `high`."""
        labels = self.labels
        chosen = {(verdict.load, verdict.config_id) for verdict in self.verdicts}
        return pd.DataFrame(
            {
                "load": row.load.label,
                "clients": row.load.clients,
                "configuration": labels[row.config_id],
                "config_id": row.config_id,
                "chosen": (row.load, row.config_id) in chosen,
                "decoded_live": row.config_id in self.decoded,
                "speedup": row.speedup,
                "low": row.low,
                "high": row.high,
                **dict(self._checked(row)),
            }
            for row in self.rows
        )

    def errors(self) -> dict[str, float]:
        """The median of the simulation's absolute relative errors, by measure; empty where nothing
        was timed."""
        if not self.timed:
            return {}
        table = self.table()
        return {name: float(table[f"{name}_error"].abs().median()) for name in ("value", *CHECKED)}

    def _checked(self, row: Compared) -> Iterator[tuple[str, float]]:
        for name in ("value", *CHECKED):
            simulated = self._value(row.simulated, name)
            live = math.nan if row.typical is None else self._value(row.typical, name)
            yield name, live
            yield f"{name}_simulated", simulated
            yield f"{name}_error", simulated / live - 1 if live else math.nan

    def _value(self, measures: LoadMeasures, name: str) -> float:
        if name == "value":
            return float(getattr(measures, self.by))
        return measures.value(*CHECKED[name])


def finite(ratio: Ratio) -> dict[str, float | None]:
    """The fields of a row; None in place of what JSON cannot hold."""
    values = {"speedup": ratio.value, "low": ratio.low, "high": ratio.high}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
