"""A benchmark of this engine against its peers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from dashboards import cells
from dashboards.cells import Cell
from dashboards.reports.contestants import (
    CONTESTANT,
    OVER_OURS,
    by_group,
    chosen_on,
    contestants,
    lead_metrics,
    models,
    origin,
    ratio_cells,
    ratio_of,
    report_tags,
    row_tags,
    whose,
)
from dashboards.reports.sentences import sentences
from dashboards.sections import LoggedRun, Report, Section
from specdec_core.evidence.bench.result import PARTS, BenchResult, parts_frame, summary_frame
from specdec_core.evidence.bench.sets import by_set, sets_frame
from specdec_core.measure.comparison import OURS, over

NAME = ("", "contestant")
OVER = "over our autoregressive"
OF_SET = {
    "tokens/s": cells.number("tokens_per_second", ".0f"),
    OVER: OVER_OURS,
    "MAT": cells.number("mean_accepted", ".2f"),
}


def report(result: BenchResult) -> Report:
    """The report of a benchmark."""
    summary = summary_frame(result)
    frames = {
        temperature: by_group(result, summary[summary["temperature"] == temperature])
        for temperature in result.temperatures
    }
    return Report(
        command="bench offline",
        title=f"Benchmark of {result.pair.name}",
        origin=origin(result, how_measured(result)),
        findings=findings(result),
        parts=[
            *(_speed(result, frame, temperature) for temperature, frame in frames.items()),
            *_sets(result, frames),
            *(part for temperature in frames for part in _parts(result, temperature)),
            contestants(result.rows),
            sentences((row.name, row.configuration) for row in result.rows if row.configuration),
        ],
        frames={"summary": summary},
        metrics={
            name: value
            for lead in result.leads()
            for name, value in lead_metrics(lead, f"_T{lead.at:g}").items()
        },
        tags=report_tags(result),
        nested=list(_rows(result, summary)),
    )


def findings(result: BenchResult) -> list[str]:
    """The results in sentences."""
    return [
        *_against_peers(result),
        *_over_autoregressive(result),
        *_unequal(result),
    ]


def _against_peers(result: BenchResult) -> Iterator[str]:
    for best in result.leads():
        chosen = chosen_on(best, "prompts")
        yield (
            f"temperature {best.at:g}: our best, {best.ours}, is {ratio_of(best)}"
            f" {whose(best.group)} best, {best.theirs} ({chosen})"
        )


def _over_autoregressive(result: BenchResult) -> Iterator[str]:
    for temperature in result.temperatures:
        row, baseline = result.best(temperature, OURS), result.autoregressive(temperature)
        if row is None or baseline is None:
            continue
        line = (
            f"temperature {temperature:g}: {row.name} writes {row.tokens_per_second:.0f} tokens/s,"
            f" {cells.of_ratio(over(row, baseline))} our autoregressive decoding"
        )
        if parts := row.seconds_by_part():
            shares = {title: parts[n] / sum(parts.values()) for n, title in PARTS.items()}
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
        f" {result.max_new_tokens} new tokens, repeats {result.repeats}: contestants are"
        " interleaved on every prompt, in an order that is drawn for each; before each repeat all"
        " drafters, also those of other libraries, forget what they learned from earlier prompts",
        *result.notes,
    ]


def _speed(result: BenchResult, frame: pd.DataFrame, temperature: float) -> Section:
    """Tokens a second and the ratios, the fastest first within each group."""
    best = [result.best(temperature, group) for group in result.groups]
    names = {(row.group, row.name) for row in best if row is not None}
    pairs = zip(frame["group"], frame["contestant"], strict=True)
    equal = {"equal to its own autoregressive": _equal("own")}
    if len(result.groups) > 1:
        equal["equal to ours"] = _equal("ours")
    columns = {
        **CONTESTANT,
        "tokens/s": cells.number("tokens_per_second", ".0f"),
        **ratio_cells(result),
        "MAT": cells.number("mean_accepted", ".2f"),
        **(equal if temperature == 0 else {}),
    }
    return Section(
        key=f"temperature_{temperature:g}",
        title=f"Temperature {temperature:g}",
        note=_speed_note(result, temperature),
        frame=frame,
        shown=cells.table(frame, columns),
        marked=tuple(number for number, pair in enumerate(pairs) if pair in names),
    )


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


def _equal(name: str) -> Cell:
    """How many outputs equal the reference's, and the first token at which one differs."""

    def cell(row: Mapping[str, Any]) -> str:
        if cells.unknown(row[f"compared_{name}"]):
            return cells.NONE
        text = f"{row[f'equal_{name}']:.0f} of {row[f'compared_{name}']:.0f}"
        first = row[f"first_difference_{name}"]
        return text if cells.unknown(first) else f"{text}, from {first:.0f}"

    return cell


def _sets(result: BenchResult, frames: Mapping[float, pd.DataFrame]) -> Iterator[Section]:
    """The speed of each contestant on each of several prompt sets, in the order of `frames`, which
    are of all prompts."""
    whole, sets = sets_frame(result), by_set(result)
    if not sets:
        return
    for temperature, overall in frames.items():
        frame = whole[whole["temperature"] == temperature]
        order = [*zip(overall["group"], overall["contestant"], strict=True)]
        shown = pd.DataFrame({NAME: [name for _, name in order]}, dtype=object)
        best: list[tuple[int, int]] = []
        for name, part in sets.items():
            of_set = frame[frame["set"] == name].set_index(["group", "contestant"])
            fastest = part.best(temperature, OURS)
            if fastest is not None:
                best.append((order.index((OURS, fastest.name)), shown.shape[1] + 1))
            for heading, column in cells.table(of_set.loc[order].reset_index(), OF_SET).items():
                shown[f"{name} ({len(part.ids)})", heading] = column
        yield Section(
            key=f"sets_{temperature:g}",
            title=f"By prompt set, temperature {temperature:g}",
            note="As above, on each set's prompts alone, whose number is in brackets, in the order"
            " of all prompts; stressed, our fastest on the set.",
            frame=frame,
            shown=shown,
            best=best,
            brief=[NAME, *shown.columns[shown.columns.get_level_values(1) == OVER]],
            intervals=False,
        )


def _parts(result: BenchResult, temperature: float) -> Iterator[Section]:
    """Where a token's time goes in our rows."""
    frame = parts_frame(result, temperature)
    if not len(frame):
        return
    shares = frame[[f"{name}_ms" for name in PARTS]].div(frame["ms_per_token"], axis=0)
    columns = {title: cells.number(f"{name}_ms", ".0%") for name, title in PARTS.items()}
    whole = {**CONTESTANT, "ms a token": cells.number("ms_per_token", ".2f")}
    yield Section(
        key=f"parts_{temperature:g}",
        title=f"Where a token's time goes, temperature {temperature:g}",
        note="Milliseconds of an output token, and the share of each part of a round, of the"
        " prefill, and of what is outside rounds: opening and closing requests, text.",
        frame=frame,
        shown=pd.concat([cells.table(frame, whole), cells.table(shares, columns)], axis=1),
    )


def _rows(result: BenchResult, summary: pd.DataFrame) -> Iterator[LoggedRun]:
    """A nested run a contestant and temperature."""
    for row, values in zip(result.rows, summary.to_dict("records"), strict=True):
        numbers = {
            str(name): float(value)
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and not pd.isna(value)
        }
        parts = {f"{name}_ms": 1e3 * seconds for name, seconds in row.seconds_by_part().items()}
        yield LoggedRun(
            name=f"{row.group}: {row.name}, T={row.temperature:g}",
            params=row.settings,
            metrics={**numbers, **parts},
            tags=row_tags(row, row.temperature),
        )
