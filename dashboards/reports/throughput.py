"""Throughput by batch size, the K that suits each, and what a long context costs."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from dashboards import cells
from dashboards.figures.throughput import context_figure, throughput_figure
from dashboards.reports.sentences import sentences
from dashboards.sections import Origin, Report, Section, metric_name
from specdec_core.config import Configuration
from specdec_core.studies.batch_choice import BatchChoice
from specdec_core.studies.long_context import Line
from specdec_core.studies.throughput import Throughput, stops_paying

COLUMNS = {
    "slots": cells.text("slots"),
    "configuration": cells.text("configuration"),
    "tokens/s": cells.number("tokens_per_second", ".0f"),
    "over autoregressive": cells.ratio("speedup", "low", "high"),
    "MAT": cells.number("mat", ".2f"),
    "other outputs": cells.text("differing"),
}
PARTS = {  # of a round
    "target_1": "target n=1",
    "target_8": "target n=8",
    "draft": "draft n=1",
    "autoregressive_round": "autoregressive round",
    "autoregressive_rest": "rest of it",
    "round": "round, K=7",
    "rest": "its rest",
}
BRIEF_PARTS = ("target_1", "target_8", "draft", "round", "rest")
BRIEF_LENGTHS = (1, 2, 4, 8)
METRICS = ("tokens_per_second", "speedup", "low", "high", "mat", "differing")


def report(
    result: Throughput, choice: BatchChoice, contexts: pd.DataFrame | None, origin: Origin
) -> Report:
    """`contexts` are :func:`specdec_core.studies.long_context.measure_contexts`'s, if measured."""
    plan = choice.configuration
    lines = [*paying(result), *(against_others(result, plan) if plan is not None else ())]
    if plan is None:
        lines.append("best: draft nothing, at every number of slots")
    else:
        origin = replace(origin, params={**origin.params, "plan": plan.to_yaml()})
    return Report(
        command="throughput",
        title=f"Throughput of {origin.pair}",
        origin=origin,
        findings=lines,
        parts=[
            throughput_section(result),
            plan_section(choice),
            *([contexts_section(contexts)] if contexts is not None else []),
            sentences((result.labels[c.id], c) for c in result.configurations),
        ],
        frames={"runs": result.frame()},
        metrics=_metrics(result, contexts),
    )


def throughput_section(result: Throughput) -> Section:
    """Tokens a second and speedups by slots; the fastest at each number of slots is marked."""
    table = result.table()
    return Section(
        key="throughput",
        title="Throughput by batch size",
        note="Tokens a second of all requests together while every slot is busy, prefill included:"
        " a queue is longer than the slots, and the clock stops where the first slot stays empty."
        " Ratios with 95 % bootstrap intervals over queues and repeats, all in turns. Other outputs"
        " are those unlike autoregressive decoding's of the same requests (near-ties).",
        frame=table,
        shown=cells.table(table, COLUMNS),
        figure=throughput_figure(table, "Throughput by batch size"),
        marked=tuple(table.groupby("slots")["tokens_per_second"].idxmax()),
        ruled=cells.group_ends(table["slots"]),
    )


def paying(result: Throughput) -> list[str]:
    """For each configuration, the number of slots from which on it is not certainly faster."""
    table, lines = result.table(), []
    for configuration in result.configurations[1:]:
        end = stops_paying(table, configuration.id)
        lines.append(
            f"{result.labels[configuration.id]}: "
            + (
                "faster than autoregressive decoding at all of"
                f" {', '.join(map(str, result.slots))} slots"
                if end is None
                else f"stops paying at {_slots(end)}"
            )
        )
    return lines


def against_others(result: Throughput, plan: Configuration) -> list[str]:
    """At each number of slots, how the plan compares with the fastest of the others."""
    table, lines = result.table(), []
    for slots in sorted(result.slots):
        others = table[(table["slots"] == slots) & (table["config_id"] != plan.id)]
        best = others.iloc[others["tokens_per_second"].argmax()]
        ratio = result.over(slots, plan.id, best["config_id"])
        lines.append(
            f"{_slots(slots)}: {result.labels[plan.id]} is {cells.verdict(ratio)} the fastest"
            f" other, {best['configuration']}: {cells.of_ratio(ratio)}"
        )
    return lines


def plan_section(choice: BatchChoice) -> Section:
    """What the profile expects of each K at each number of requests."""
    wide = choice.predicted.pivot(index="batch", columns="tokens", values="speedup").reset_index()
    lengths = {f"K={k}": cells.number(k, ".2f×") for k in wide.columns[1:] if k}
    brief = [f"K={k}" for k in BRIEF_LENGTHS if f"K={k}" in lengths]
    return Section(
        key="plan",
        title="K for each batch size, by the profile",
        note="Modelled speedup over autoregressive decoding: counts from where the draft agrees"
        " with the target's greedy text, times from the profile. Best 0: draft nothing.",
        frame=choice.predicted,
        shown=cells.table(
            wide,
            {
                "requests": cells.count("batch"),
                "best K": lambda row: str(choice.best[int(row["batch"])]),
                **lengths,
            },
        ),
        brief=("requests", "best K", *brief),
    )


def contexts_section(table: pd.DataFrame) -> Section:
    """Milliseconds of forwards and rounds by context, and what 1,000 tokens more add."""
    lines = {part: Line.fit(table["context"].tolist(), table[part].tolist()) for part in PARTS}
    shown = cells.table(
        table,
        {
            "context": cells.count("context"),
            **{heading: cells.milliseconds(part) for part, heading in PARTS.items()},
        },
    )
    slopes = [f"{1e6 * lines[part].per_token:+.2f}" for part in PARTS]
    shown.loc[len(shown)] = ["+1,000", *slopes]
    return Section(
        key="contexts",
        title="Cost by context",
        note="Milliseconds, medians of one row. Attention reads the cache once a forward; the rest"
        " of a round is what is left when its forwards, timed alone, are taken away, and does not"
        " depend on the context.",
        frame=table,
        shown=shown,
        figure=context_figure(table, lines, "A round costs what its forwards' attention costs"),
        marked=(len(shown) - 1,),
        brief=("context", *(PARTS[part] for part in BRIEF_PARTS)),
    )


def _metrics(result: Throughput, contexts: pd.DataFrame | None) -> dict[str, dict[int, float]]:
    """A configuration's metrics by the number of slots, those of a round's parts by the context."""
    metrics: dict[str, dict[int, float]] = {}
    for row in result.table().to_dict("records"):
        for name in METRICS:
            by_slots = metrics.setdefault(f"{metric_name(row['configuration'])}.{name}", {})
            by_slots[int(row["slots"])] = row[name]
    for row in [] if contexts is None else contexts.to_dict("records"):
        for part in PARTS:
            by_context = metrics.setdefault(f"context.{part}_ms", {})
            by_context[int(row["context"])] = 1e3 * row[part]
    return metrics


def _slots(count: int) -> str:
    return f"{count} slot{'s' if count > 1 else ''}"
