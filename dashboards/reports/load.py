"""A comparison of servers under load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pandas as pd

from dashboards import cells
from dashboards.cells import Cell
from dashboards.figures.load import load_figure
from dashboards.reports.contestants import (
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
)
from dashboards.reports.sentences import sentences
from dashboards.sections import LoggedRun, Metrics, Report, Section, metric_name
from specdec_core.evidence.load.plan import SLOTS
from specdec_core.evidence.load.result import LoadResult, requests_frame, summary_frame
from specdec_core.measure.comparison import OURS, over
from specdec_core.search.load.workload import Load

# Of the nested runs: numbers of the summary, by load.
METRICS = (
    *("tokens_per_second", "whole_run", "requests_per_second", "goodput", "good_share", "errors"),
    *("ttft_median", "ttft_p95", "tpot_median", "tpot_p95", "candidates"),
    *("over_autoregressive", "over_autoregressive_low", "over_autoregressive_high"),
)

TIMES = (
    "TTFT: from sending a request, or from its arrival time, to its first token. TPOT: from then"
    " to the last, for each further token. Both by the client's clock, median and 95th percentile."
)
RATIOS = (
    "with 95 % bootstrap intervals over requests and repeats, in pairs; requests at the same time"
    " are not independent, so intervals of many at once are too narrow rather than too wide."
)


def report(result: LoadResult) -> Report:
    summary = summary_frame(result)
    return Report(
        command="bench serve",
        title=f"Servers under load, {result.pair.name}",
        origin=origin(
            result,
            how_measured(result),
            clients=",".join(str(load.clients) for load in result.loads if load.closed),
            rates=",".join(f"{load.rate:g}" for load in result.loads if not load.closed),
            slo=str(result.slo) if result.slo else None,
            slots=result.slots,
        ),
        findings=findings(result),
        parts=[
            *_load(result, summary),
            *_errors(result),
            contestants(result.rows),
            sentences((row.name, row.configuration) for row in result.rows if row.configuration),
        ],
        frames={
            "requests": requests_frame(result),
            "summary": summary,
        },
        metrics=by_load(
            (lead.at, name, value)
            for lead in result.leads()
            for name, value in lead_metrics(lead).items()
        ),
        tags=report_tags(result),
        nested=list(nested_runs(result, summary)),
    )


def findings(result: LoadResult) -> list[str]:
    """The results in sentences."""
    return [
        *_against_peers(result),
        *_against_ourselves(result),
        *_within_the_limits(result),
        *_unequal(result),
    ]


def _against_peers(result: LoadResult) -> Iterator[str]:
    for lead in result.leads():
        ratio, closed = ratio_of(lead), lead.at.closed
        what = f"writes {ratio} the tokens a second of" if closed else f"answers {ratio} as fast as"
        chosen = chosen_on(lead, "requests")
        yield (
            f"{lead.at}: our best, {lead.ours}, {what} {lead.group}'s best, {lead.theirs}"
            f" ({chosen})"
        )


def _against_ourselves(result: LoadResult) -> Iterator[str]:
    baseline = result.autoregressive()
    for load in result.loads:
        best = result.best(load, OURS)
        if best is None or baseline is None or best is baseline:
            continue
        ratio = cells.of_ratio(over(best, baseline, load))
        if load.closed:
            what = f"writes {best.tokens_per_second(load):.0f} tokens/s, {ratio}"
        else:
            what = f"answers {ratio} as fast as"
        yield f"{load}: {best.name} {what} our autoregressive decoding"


def _within_the_limits(result: LoadResult) -> Iterator[str]:
    """At rates with an objective: the best of every group by goodput."""
    if result.slo is None:
        return
    for load in result.loads:
        best = [row for group in result.groups if (row := result.best(load, group)) is not None]
        if best and not load.closed:
            shares = (f"{row.good_share(load, result.slo):.0%} of {row.name}'s" for row in best)
            yield f"{load}: {', '.join(shares)} requests keep {result.slo}"


def _unequal(result: LoadResult) -> Iterator[str]:
    baseline = result.autoregressive()
    for load, row in result.unequal():
        assert baseline is not None  # it is what they were compared with
        equal, compared = row.equal_texts(load, baseline)
        yield (
            f"NOT LOSSLESS: {load}: {compared - equal} of {compared} texts of"
            f" {row.name} differ from autoregressive decoding's in float32"
        )


def how_measured(result: LoadResult) -> list[str]:
    """Command, models, prompts, machine."""
    requests = ", ".join(f"{load.requests} with {load}" for load in result.loads)
    lines = [
        f"`{result.command}`",
        models(result.pair),
        f"{result.prompts.count} prompts of {result.prompts.label} (sha256"
        f" {result.prompts.digest[:16]}…), {result.max_new_tokens} new tokens each, greedy, without"
        f" stopping at an end of text; requests to a server: {requests}; repeats {result.repeats}",
    ]
    slots = [] if result.slots is None else [str(result.slots)]
    if any(load.closed for load in result.loads):
        lines.append("closed loop: each client sends its next request when its last is answered")
        slots = slots or ["as many as there are clients"]
    if not all(load.closed for load in result.loads):
        late = 1e3 * result.lateness()
        lines.append(
            "open loop: requests are sent at random times (Poisson), the same for every server,"
            " whether or not earlier ones are answered, and their latencies count from then on; the"
            f" client sent them {np.median(late):.1f} ms late (median), {late.max():.0f} at most"
        )
        slots += [] if result.slots is not None else [f"{SLOTS} at a rate"]
    starts = (
        "once in each repeat, for all loads, each with prompts of its own"
        if result.one_server
        else "anew for every load"
    )
    return [
        *lines,
        f"sent over /v1/completions, streamed; every server was started {starts}, interleaved with"
        " the others, and warmed up with other prompts, all at once; no prompt was sent to a server"
        " twice",
        f"requests decoded together: {', '.join(slots)}; prefix caches off",
        *result.notes,
    ]


def _load(result: LoadResult, summary: pd.DataFrame) -> Iterator[Section]:
    """Each contestant under every load, the fastest first within each group."""
    closed = summary[summary["clients"].notna()]
    if len(closed):
        yield _table(
            result,
            closed,
            by_group(result, closed, "clients"),
            key="load",
            title="Throughput and latency by the number of clients",
            note="Tokens a second of all clients together while all of them wait: their number over"
            f" the mean seconds a token of a request. {TIMES} Ratios of tokens a second, {RATIOS}"
            " A group's best is its fastest row on these requests.",
            columns={"clients": cells.count("clients")},
            in_report=("good requests/s", "good"),
        )
    at_rates = summary[summary["rate"].notna()]
    if len(at_rates):
        what = "Goodput" if result.slo else "Throughput"
        best = "with the most requests within the limits, then the " if result.slo else ""
        yield _table(
            result,
            at_rates,
            by_group(result, at_rates, "rate", slowness="latency_median"),
            key="rates",
            title=f"{what} and latency by the rate of requests",
            note="Tokens a second are those of a whole run over its seconds: what the requests"
            f" asked for, while a server keeps up. {TIMES} Ratios of how fast a request is"
            f" answered, from its arrival to its end, {RATIOS} A group's best is its row"
            f" {best}fastest on these requests.",
            columns={"requests/s": cells.number("rate", "g")},
            in_report=("tokens/s", "TTFT ms") if result.slo else ("TTFT ms",),
        )


def _table(
    result: LoadResult,
    summary: pd.DataFrame,
    frame: pd.DataFrame,
    key: str,
    title: str,
    note: str,
    columns: dict[str, Cell],
    in_report: Sequence[str],
) -> Section:
    """The rows of `summary` in the order of `frame`: `columns` with the load, then the measures of
    each contestant. A console leaves out the columns `in_report`."""
    loads = [load for load in result.loads if load.key in set(frame["load"])]
    best = {
        (load.key, row.group, row.name)
        for load in loads
        for group in result.groups
        if (row := result.best(load, group)) is not None
    }
    keys = zip(frame["load"], frame["group"], frame["contestant"], strict=True)
    good = {
        "good requests/s": cells.number("goodput", ".2f"),
        "good": cells.number("good_share", ".0%"),
    }
    columns = {
        **columns,
        "contestant": cells.text("contestant"),
        "tokens/s": cells.number("tokens_per_second", ".0f"),
        **(good if result.slo else {}),
        "TTFT ms": cells.number("ttft_median", ".1f", 1e3),
        "TTFT p95": cells.number("ttft_p95", ".1f", 1e3),
        "TPOT ms": cells.number("tpot_median", ".1f", 1e3),
        "TPOT p95": cells.number("tpot_p95", ".1f", 1e3),
        "errors": cells.count("errors"),
        **ratio_cells(result),
        "equal texts": lambda row: f"{row['equal']:.0f} of {row['compared']:.0f}",
    }
    limits = f" Good requests are those with {result.slo}." if result.slo else ""
    return Section(
        key=key,
        title=title,
        note=f"{note}{limits} Equal texts are those of autoregressive decoding in our server"
        f" ({result.pair.runner.target_dtype}).",
        frame=frame,
        shown=cells.table(frame, columns),
        figure=load_figure(summary, title, result.slo),
        marked=tuple(number for number, each in enumerate(keys) if each in best),
        ruled=cells.group_ends(frame["load"]),
        brief=[name for name in columns if name not in ("TPOT p95", "equal texts", *in_report)],
    )


def _errors(result: LoadResult) -> Iterator[Section]:
    """What failed, if anything did: how often and why."""
    frame = requests_frame(result)
    failed = frame[frame["error"].notna()]
    if len(failed):
        counted = failed.groupby(["load", "contestant", "error"], as_index=False).size()
        yield Section(
            key="errors",
            title="Errors",
            note="Requests that failed; they count neither in speeds nor in times.",
            frame=counted,
            shown=cells.everything(counted),
        )


def nested_runs(result: LoadResult, summary: pd.DataFrame) -> Iterator[LoggedRun]:
    """A nested run a contestant, its metrics by load."""
    loads = {load.key: load for load in result.loads}
    for row in result.rows:
        mine = summary[(summary["group"] == row.group) & (summary["contestant"] == row.name)]
        yield LoggedRun(
            name=f"{row.group}: {row.name}, under load",
            params=row.settings,
            metrics=by_load(
                (loads[each["load"]], name, float(each[name]))
                for each in mine.to_dict("records")
                for name in METRICS
                if not pd.isna(each[name])
            ),
            tags=row_tags(row, temperature=0),
        )


def by_load(found: Iterable[tuple[Load, str, float]]) -> Metrics:
    """Metrics by step: the number of clients. Metrics at a rate have the rate in their name."""
    metrics: Metrics = {}
    steps: dict[str, dict[int, float]] = {}
    for load, name, value in found:
        if load.clients is None:
            metrics[metric_name(f"rate {load.rate:g}", name)] = value
        else:
            steps.setdefault(name, {})[load.clients] = value
    return metrics | steps
