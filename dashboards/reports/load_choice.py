"""The choice of a configuration for each load, and how well the simulation of load does."""

from __future__ import annotations

from typing import NamedTuple

from dashboards import cells
from dashboards.cells import Cell
from dashboards.reports.sentences import limited
from dashboards.sections import Metrics, Section
from specdec_core.search.load.result import Compared, LoadChoice, LoadVerdict


class Measure(NamedTuple):
    """A heading, a number's format and the factor of its unit."""

    heading: str
    form: str
    scale: float = 1.0


# What is compared, by objective.
OBJECTIVES = {
    "tokens_per_second": Measure("tokens/s", ",.0f"),
    "goodput": Measure("good requests/s", ",.2f"),
    "request_speed": Measure("tokens/s of a request", ",.1f"),
}


def served(choice: LoadChoice) -> Section:
    """What is served, and why."""
    return Section(key="served", title="For many requests at once", lines=findings(choice))


def findings(choice: LoadChoice) -> list[str]:
    """What is served, a sentence for each load, and the simulation's error."""
    lines = [choice.chosen.sentence, *verdicts(choice)]
    if len({verdict.config_id for verdict in choice.verdicts}) > 1:
        gains = [f"{_gain(row)} with {load.label}" for load, row in choice.served().items()]
        lines.append(f"All of this together, as it is served: {', '.join(gains)}.")
    errors = choice.errors()
    if errors:
        lines.append(
            f"The simulation is off by {errors['value']:.0%} in {OBJECTIVES[choice.by].heading},"
            f" {errors['tpot']:.0%} in TPOT (median) and {errors['ttft']:.0%} in TTFT (95th"
            " percentile), in the median of all that was timed."
        )
    return lines


def load_metrics(choice: LoadChoice) -> Metrics:
    """What is served and what its choice may cost, by number of clients (0: an open loop), and the
    simulation's errors."""
    rows = {load.clients or 0: row for load, row in choice.served().items()}
    kept = [verdict for verdict in choice.verdicts if not choice.unkept(verdict.load)]
    by_load: dict[str, dict[int, float | None]] = {
        "load_speedup": {step: row.speedup for step, row in rows.items()},
        "load_speedup_low": {step: row.low for step, row in rows.items()},
        "load_speedup_high": {step: row.high for step, row in rows.items()},
        f"load_{choice.by}": {step: _value(choice, row) for step, row in rows.items()},
        "load_regret": {verdict.load.clients or 0: verdict.regret for verdict in kept},
        "load_regret_at_most": {verdict.load.clients or 0: verdict.at_most for verdict in kept},
    }
    metrics: Metrics = {f"simulation_error_{name}": e for name, e in choice.errors().items()}
    for name, values in by_load.items():
        if known := {step: value for step, value in values.items() if value is not None}:
            metrics[name] = known
    return metrics


def verdicts(choice: LoadChoice) -> list[str]:
    """What was chosen for each load, what it reaches and what it may cost."""
    return [_verdict(choice, verdict) for verdict in choice.verdicts]


def _verdict(choice: LoadChoice, verdict: LoadVerdict) -> str:
    row, label = choice.row(verdict.load, verdict.config_id), choice.labels[verdict.config_id]
    if (nearest := choice.unkept(verdict.load)) is not None:
        return (
            f"{verdict.load.label}: no configuration meets {choice.slo}, so {label} is no better"
            f" than the others; nearest comes {choice.labels[nearest.config_id]}"
            f" ({limited(nearest.known, choice.slo)})"
        )
    objective = OBJECTIVES[choice.by]
    text = (
        f"{verdict.load.label}: {label}, {_value(choice, row):{objective.form}}"
        f" {objective.heading}, {_gain(row)} autoregressive decoding"
    )
    if verdict.regret is None or verdict.at_most is None:
        return f"{text}, simulated"
    return (
        f"{text}; it costs at most {verdict.at_most:.1%} of the best timed there (expected"
        f" {verdict.regret:.1%})"
    )


def _value(choice: LoadChoice, row: Compared) -> float:
    """The objective, live where it was timed."""
    return float(getattr(row.known, choice.by))


def _gain(row: Compared) -> str:
    return cells.as_ratio(row.speedup, row.low, row.high)


def loads(choice: LoadChoice) -> Section:
    """What was compared at each load."""
    table = choice.table()
    objective = OBJECTIVES[choice.by]
    source = "" if choice.timed else "_simulated"
    columns: dict[str, Cell] = {
        "load": cells.text("load"),
        "configuration": _marked,
        objective.heading: cells.number(f"value{source}", objective.form),
        "over autoregressive": cells.ratio("speedup", "low", "high"),
        "TPOT p50, ms": cells.milliseconds(f"tpot{source}"),
        "TTFT p95, ms": cells.milliseconds(f"ttft{source}"),
    }
    brief = list(columns)[:4]
    if choice.timed:
        columns["the choice costs"] = _costs(choice)
    by = f"goodput with {choice.slo}" if choice.slo else objective.heading
    pace = f", {choice.pace:,.0f} times as fast as an engine decodes" if choice.pace else ""
    how = (
        "Each answered the same requests on the live engine, interleaved with autoregressive"
        " decoding; medians of the repeats, ratios with 95 % bootstrap intervals over requests and"
        " repeats, which with many clients are rather too narrow. Costs: what the choice falls"
        " behind the best timed there, expected and from … to."
        if choice.timed
        else "By simulation alone."
    )
    decoded = (
        " Those marked † cannot be replayed: they were simulated from rounds decoded live."
        if choice.decoded
        else ""
    )
    return Section(
        key="loads",
        title=f"The choice for each load, by {by}",
        note=f"{how} {choice.simulated} configurations were simulated{pace}.{decoded}",
        shown=cells.table(table, columns),
        legend="★ chosen for this load" + (", † decoded live" if choice.decoded else ""),
        frame=table,
        marked=[n for n, chosen in enumerate(table["chosen"]) if chosen],
        ruled=cells.group_ends(table["load"]),
        brief=brief,
    )


def _marked(row: cells.Row) -> str:
    marks = " †" * row["decoded_live"] + " ★" * row["chosen"]
    return f"{row['configuration']}{marks}"


def _costs(choice: LoadChoice) -> Cell:
    verdicts = {verdict.load.label: verdict for verdict in choice.verdicts}

    def cell(row: cells.Row) -> str:
        verdict = verdicts[row["load"]]
        if not row["chosen"] or verdict.regret is None or choice.unkept(verdict.load):
            return ""
        return f"{verdict.regret:.1%} ({verdict.low:.1%} to {verdict.at_most:.1%})"

    return cell


def simulation(choice: LoadChoice) -> list[Section]:
    """The simulation against live runs, where there were any: each measure live, simulated and the
    simulation's error."""
    if not choice.timed:
        return []
    table = choice.table()
    columns = {name: cells.text(name) for name in ("load", "configuration")}
    measures = {
        "value": OBJECTIVES[choice.by],
        "tpot": Measure("TPOT p50, ms", ".2f", 1e3),
        "ttft": Measure("TTFT p95, ms", ".2f", 1e3),
    }
    shown: dict[str, Cell] = dict(columns)
    for place, (name, (heading, form, scale)) in enumerate(measures.items()):
        again = " " * place  # headings have to differ
        shown |= {
            heading: cells.number(name, form, scale),
            f"simulated{again}": cells.number(f"{name}_simulated", form, scale),
            f"off by{again}": cells.number(f"{name}_error", "+.0%"),
        }
    numbers = [f"{name}{end}" for name in measures for end in ("", "_simulated", "_error")]
    frame = table[[*columns, *numbers]]
    section = Section(
        key="simulation",
        title="The simulation against the live engine",
        note="The same requests, simulated from recorded rounds and step times; live runs are those"
        " of median length.",
        frame=frame,
        shown=cells.table(frame, shown),
        ruled=cells.group_ends(table["load"]),
        on_console=False,
    )
    return [section]
