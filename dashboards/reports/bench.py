"""A benchmark of this engine against its peers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from dashboards import cells
from dashboards.cells import Cell
from dashboards.figures.bench import bench_figure, bench_svg
from dashboards.reports.bench_sets import sets
from dashboards.reports.contestants import (
    by_group,
    chosen_on,
    contestants,
    models,
    origin,
    ratio_columns,
    report_tags,
    row_tags,
    whose,
)
from dashboards.reports.sentences import sentences
from dashboards.sections import LoggedRun, Report, Section
from specdec_core.base.names import plain_name
from specdec_core.evidence.bench import spec_bench
from specdec_core.evidence.bench.limits import PARTS, limits, limits_frame
from specdec_core.evidence.bench.result import (
    BenchResult,
    BenchRow,
    over,
    positions_frame,
    summary_frame,
    times_frame,
)
from specdec_core.measure.comparison import OURS

LIMITS = {
    "": cells.text("contestant"),
    "ms a token": cells.number("ms_per_token", ".2f"),
    "of its forwards' speed": cells.number("of_forwards", ".0%"),
    "of the oracle's": cells.number("of_oracle", ".0%"),
    "of a round, no forward": cells.number("beside_forwards", ".0%"),
}


def report(result: BenchResult, baseline: Sequence[spec_bench.Answer] | None = None) -> Report:
    """`baseline` are Spec-Bench answers to compare with, instead of our autoregressive ones."""
    return Report(
        command="bench offline",
        title=f"Benchmark of {result.pair.name}",
        origin=origin(result, how_measured(result)),
        findings=findings(result),
        parts=sections(result, baseline),
        frames={"times": times_frame(result), "summary": summary_frame(result)},
        metrics={
            f"over_{plain_name(best.group)}_T{best.temperature:g}{end}": value
            for best in result.headlines()
            for end, value in (("", best.ratio), ("_low", best.low), ("_high", best.high))
        },
        tags=report_tags(result),
        nested=list(_rows(result)),
    )


def sections(
    result: BenchResult, baseline: Sequence[spec_bench.Answer] | None = None
) -> list[Section]:
    """The benchmark's tables."""
    return [
        *(_speed(result, temperature) for temperature in result.temperatures),
        *(section for t in result.temperatures for section in sets(result, t)),
        *(section for t in result.temperatures for section in _positions(result, t)),
        *(section for t in result.temperatures for section in _limits(result, t)),
        *([_tasks(result, baseline)] if any(result.categories) else []),
        *_forwards(result),
        contestants(result.rows),
        sentences((row.name, row.configuration) for row in result.rows if row.configuration),
    ]


# Findings


def findings(result: BenchResult) -> list[str]:
    """The results in sentences."""
    return [
        *_against_peers(result),
        *_against_limits(result),
        *_unequal(result),
    ]


def _against_peers(result: BenchResult) -> Iterator[str]:
    for best in result.headlines():
        chosen = chosen_on(best, "prompts", f"{len(result.ids) - best.prompts} prompts")
        yield (
            f"temperature {best.temperature:g}: our best, {best.ours}, is"
            f" {cells.as_ratio(best.ratio, best.low, best.high)} {whose(best.group)} best,"
            f" {best.theirs} ({chosen})"
        )


def _against_limits(result: BenchResult) -> Iterator[str]:
    for temperature in result.temperatures:
        row, baseline = result.best(temperature, OURS), result.autoregressive(temperature)
        if row is None or baseline is None:
            continue
        line = (
            f"temperature {temperature:g}: {row.name} writes {row.tokens_per_second:.0f} tokens/s,"
            f" {cells.of_ratio(over(row, baseline))} our autoregressive decoding"
        )
        parts, oracle = limits(result, row)
        if parts is not None:
            line += f"; {parts.of_forwards:.0%} of what its forwards alone would allow"
            line += f" and {oracle:.0%} of the oracle's speed" if oracle is not None else ""
            shares = {heading: getattr(parts, n) / parts.whole for n, heading in PARTS.items()}
            shown = sorted(shares.items(), key=lambda item: -item[1])
            line += f"; its time: {', '.join(f'{h} {share:.0%}' for h, share in shown)}"
        yield line


def _unequal(result: BenchResult) -> Iterator[str]:
    if (baseline := result.autoregressive(0.0)) is None:
        return
    for row in result.unequal():
        agreement = row.agreement(baseline)
        yield (
            f"NOT LOSSLESS: {agreement.compared - agreement.equal} of {agreement.compared} outputs"
            f" of {row.name} differ from autoregressive decoding's in float32, first at token"
            f" {agreement.first}"
        )


def how_measured(result: BenchResult) -> list[str]:
    """Command, models, prompts, machine."""
    prompts = result.prompts
    return [
        f"`{result.command}`",
        models(result.pair),
        f"{prompts.count} prompts of {prompts.label} (sha256 {prompts.digest[:16]}…),"
        f" {result.max_new_tokens} new tokens, repeats {result.repeats}: every prompt is decoded by"
        " everybody in turn, another one beginning each time; before a repeat all drafters forget"
        " what they learned from earlier prompts, those of other libraries, too",
        *result.notes,
    ]


# The tables


def _speed(result: BenchResult, temperature: float) -> Section:
    """Tokens a second and the ratios, the fastest first within each group."""
    frame = summary_frame(result)
    frame = frame[frame["temperature"] == temperature]
    frame = by_group(result, frame)
    best = [result.best(temperature, group) for group in result.groups]
    names = {(row.group, row.name) for row in best if row is not None}
    pairs = zip(frame["group"], frame["contestant"], strict=True)
    return Section(
        key=f"temperature_{temperature:g}",
        title=f"Temperature {temperature:g}",
        note=_speed_note(result, temperature),
        frame=frame,
        shown=cells.table(frame, _speed_columns(result, temperature)),
        figure=bench_figure(result, temperature),
        svg=bench_svg(result, temperature),
        marked=tuple(number for number, pair in enumerate(pairs) if pair in names),
    )


def _speed_columns(result: BenchResult, temperature: float) -> dict[str, Cell]:
    equal = {"equal to its own autoregressive": _equal("own")}
    if len(result.groups) > 1:
        equal["equal to ours"] = _equal("ours")
    return {
        "": cells.text("contestant"),
        "tokens/s": cells.number("tokens_per_second", ".0f"),
        **ratio_columns(result),
        "MAT": cells.number("mean_accepted", ".2f"),
        **(equal if temperature == 0 else {}),
    }


def _speed_note(result: BenchResult, temperature: float) -> str:
    note = (
        "Tokens a second: the median over repeats of each prompt's seconds a token, prefill"
        " included, then the mean over prompts; ratios with 95 % bootstrap intervals of the pairs."
        " A group's best is its fastest row on these prompts. MAT is tokens a target forward."
    )
    if temperature:
        return (
            f"{note} Outputs are samples and of different lengths: times are compared by the token."
        )
    dtype = result.pair.runner.target_dtype
    return (
        f"{note} Equal outputs are counted over all repeats, with the first token that differs: in"
        f" {dtype} "
        + (
            "ours must all be equal."
            if dtype == "float32"
            else "near-ties can flip, because forwards of other widths round differently."
        )
    )


def _positions(result: BenchResult, temperature: float) -> Iterator[Section]:
    """How far candidates are accepted, ours and others' side by side."""
    frame = positions_frame(result, temperature)
    if not len(frame):
        return
    positions = [column for column in frame.columns if isinstance(column, int)]
    columns = {str(position): cells.number(position, ".2f") for position in positions}
    yield Section(
        key=f"positions_{temperature:g}",
        title=f"Accepted by position, temperature {temperature:g}",
        note="The share of the target's forwards that accepted at least so many candidates in a"
        " row. transformers does not tell.",
        frame=frame,
        shown=cells.table(frame, {"": cells.text("contestant"), **columns}),
        on_console=False,
    )


def _limits(result: BenchResult, temperature: float) -> Iterator[Section]:
    """How close our rows come to the physical limit, and where the rest of the time goes."""
    frame = limits_frame(result, temperature)
    if not len(frame):
        return
    shares = {heading: _part(name) for name, heading in PARTS.items()}
    yield Section(
        key=f"limits_{temperature:g}",
        title=f"Against the physical limit, temperature {temperature:g}",
        note="Speed as a share of what its forwards alone would allow (those of the same widths,"
        " timed by themselves in this run at"
        f" {result.forwards['target'].context} tokens of context, and the prefill) and of the"
        " oracle's (SpecDec++, Thm 4.1: a chain that always stops before its next rejection, at the"
        " cost of its forwards alone; what also copies from the text can be faster); the part of a"
        " round that is no forward; and where a token's time went.",
        frame=frame,
        shown=cells.table(frame, {**LIMITS, **shares}),
        brief=list(LIMITS),
    )


def _part(name: str) -> Cell:
    return lambda row: cells.as_number(row[f"{name}_ms"] / row["ms_per_token"], ".0%")


def _tasks(result: BenchResult, baseline: Sequence[spec_bench.Answer] | None) -> Section:
    """Spec-Bench's figures: speedup and mean accepted tokens of each task."""
    frame = spec_bench.tasks_frame(result, baseline)
    several = len(result.temperatures) > 1
    rows: dict[tuple[str, float], dict[str, str]] = {}
    for row in frame.to_dict("records"):
        name, temperature = row["contestant"], row["temperature"]
        label = f"{name}, T={temperature:g}" if several else name
        shown = rows.setdefault((name, temperature), {"": label})
        accepted = cells.as_number(row["mean_accepted"], ".2f")
        task = row["task"] or "other"  # of prompts without a category
        shown[task] = cells.as_number(row["speedup"], ".2f×")
        shown[task] += f" ({accepted})" if accepted != cells.NONE else ""
        if row["task"] == spec_bench.OVERALL:
            shown["tokens/s"] = cells.as_number(row["tokens_per_second"], ".0f")
    reference = "the given answers" if baseline is not None else "our autoregressive decoding"
    return Section(
        key="tasks",
        title="Spec-Bench's tasks",
        note=f"By the definitions of Spec-Bench's script: speedup over {reference} (ratio of the"
        " means over questions of tokens a second) and, in brackets, mean accepted tokens (of all"
        " target forwards). A baseline's tokens are those it reports; the script counts its text"
        " again, less one a turn.",
        frame=frame,
        shown=pd.DataFrame([*rows.values()], dtype=object),
    )


def _forwards(result: BenchResult) -> Iterator[Section]:
    """Milliseconds of the forwards by width."""
    frame = pd.DataFrame(
        {"model": model, "width": width, "context": times.context, "milliseconds": 1e3 * seconds}
        for model, times in result.forwards.items()
        for width, seconds in times.seconds.items()
    )
    if not len(frame):
        return
    wide = frame.pivot(index="model", columns="width", values="milliseconds")
    wide = wide.loc[list(result.forwards)]
    widths = {str(width): cells.number(width, ".2f") for width in wide.columns}
    wide["share"] = wide[1] / wide[1].get("target", math.nan)
    yield Section(
        key="forwards",
        title="Forwards",
        note="Medians, milliseconds, by how many tokens are fed at once, measured between the"
        " repeats; and a forward of one token as a share of the target's. A chain of K takes a"
        " draft K forwards.",
        frame=frame,
        shown=cells.table(
            wide.reset_index(),
            {"": cells.text("model"), **widths, "÷ target": cells.number("share", ".3f")},
        ),
        on_console=False,
    )


# MLflow


def _rows(result: BenchResult) -> Iterator[LoggedRun]:
    """A nested run a contestant and temperature."""
    for row, values in zip(result.rows, summary_frame(result).to_dict("records"), strict=True):
        yield LoggedRun(
            name=f"{row.group}: {row.name}, T={row.temperature:g}",
            params=row.settings,
            metrics=_row_metrics(result, row, values),
            tags=row_tags(row, row.temperature),
        )


def _row_metrics(result: BenchResult, row: BenchRow, values: cells.Row) -> dict[str, float]:
    metrics = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and not pd.isna(value)
    }
    parts, oracle = limits(result, row)
    if parts is not None:
        metrics |= {
            "of_forwards": parts.of_forwards,
            "beside_forwards": parts.beyond_forwards_share,
        }
        metrics |= {f"{name}_ms": 1e3 * getattr(parts, name) for name in PARTS}
    if oracle is not None:
        metrics["of_oracle"] = oracle
    return metrics


# Cells


def _equal(name: str) -> Cell:
    """How many outputs equal the reference's, and the first token at which one differs."""

    def cell(row: Mapping[str, Any]) -> str:
        if cells.unknown(row[f"compared_{name}"]):
            return cells.NONE
        text = f"{row[f'equal_{name}']:.0f} of {row[f'compared_{name}']:.0f}"
        first = row[f"first_difference_{name}"]
        return text if cells.unknown(first) else f"{text}, from {first:.0f}"

    return cell
