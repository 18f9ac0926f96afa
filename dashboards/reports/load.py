"""A comparison of servers under load."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from dashboards import cells
from dashboards.cells import Cell
from dashboards.figures.load import load_figure
from dashboards.reports.contestants import contestants, models
from dashboards.reports.sentences import note, sentences
from dashboards.sections import Origin, Report, Run, Section
from specdec_core.base.names import plain_name
from specdec_core.studies.bench.result import OURS
from specdec_core.studies.load.result import LoadResult, over, requests_frame, summary_frame

# Of the nested runs; those of the summary that are numbers by number of clients.
METRICS = (
    *("tokens_per_second", "whole_run", "errors"),
    *("ttft_median", "ttft_p95", "tpot_median", "tpot_p95"),
    *("over_autoregressive", "over_autoregressive_low", "over_autoregressive_high"),
)


def report(result: LoadResult) -> Report:
    summary = summary_frame(result)
    return Report(
        command="bench",
        title=f"Servers under load, {result.pair.name}",
        origin=Origin(
            name=result.name,
            pair=result.pair.name,
            notes=how_measured(result),
            params={
                "pair": result.pair.model_dump(mode="json"),
                "prompts": {"source": result.prompts.source, "count": result.prompts.count},
                "max_new_tokens": result.max_new_tokens,
                "repeats": result.repeats,
                "clients": ",".join(map(str, result.clients)),
                "slots": result.slots,
            },
            started=result.started,
            facts=result.environment,
        ),
        findings=findings(result),
        parts=[
            _load(result, summary),
            *_errors(result),
            contestants(result.rows),
            sentences((row.name, row.configuration) for row in result.rows if row.configuration),
        ],
        frames={"requests": requests_frame(result), "summary": summary},
        metrics={
            f"over_{plain_name(lead.group)}{end}": {
                each.clients: value(each) for each in result.leads() if each.group == lead.group
            }
            for lead in result.leads()
            for end, value in (
                ("", lambda each: each.ratio),
                ("_low", lambda each: each.low),
                ("_high", lambda each: each.high),
            )
        },
        tags={
            "prompts": result.prompts.source,
            "prompts_digest": result.prompts.digest,
            **result.environment,
        },
        nested=list(_rows(result, summary)),
    )


# Findings


def findings(result: LoadResult) -> list[str]:
    """The results in sentences."""
    return [*_against_peers(result), *_against_ourselves(result), *_unequal(result)]


def _against_peers(result: LoadResult) -> Iterator[str]:
    for lead in result.leads():
        chosen = (
            f"both chosen on every other request, compared on the {lead.requests} others"
            if lead.held_out
            else f"both chosen on the same {lead.requests} requests, which flatters both"
        )
        yield (
            f"{_clients(lead.clients)}: our best, {lead.ours}, writes"
            f" {cells.as_ratio(lead.ratio, lead.low, lead.high)} the tokens a second of"
            f" {lead.group}'s best, {lead.theirs} ({chosen})"
        )


def _against_ourselves(result: LoadResult) -> Iterator[str]:
    baseline = result.autoregressive()
    for clients in result.clients:
        best = result.best(clients, OURS)
        if best is None or baseline is None or best is baseline:
            continue
        speed, ratio = best.tokens_per_second(clients), over(best, baseline, clients)
        yield (
            f"{_clients(clients)}: {best.name} writes {speed:.0f} tokens/s,"
            f" {cells.of_ratio(ratio)} our autoregressive decoding"
        )


def _unequal(result: LoadResult) -> Iterator[str]:
    baseline = result.autoregressive()
    for clients, row in result.unequal():
        assert baseline is not None  # it is what they were compared with
        equal, compared = row.equal_texts(clients, baseline)
        yield (
            f"NOT LOSSLESS: {_clients(clients)}: {compared - equal} of {compared} texts of"
            f" {row.name} differ from autoregressive decoding's in float32"
        )


def how_measured(result: LoadResult) -> list[str]:
    """Command, models, prompts, machine."""
    requests = ", ".join(f"{count} with {_clients(n)}" for n, count in result.requests.items())
    slots = "as many as there are clients" if result.slots is None else str(result.slots)
    return [
        f"`{result.command}`",
        models(result.pair),
        f"{result.prompts.count} prompts of {result.prompts.source} (sha256"
        f" {result.prompts.digest[:16]}…), {result.max_new_tokens} new tokens each, greedy, past"
        f" the ends of texts; requests to a server: {requests}; repeats {result.repeats}",
        "closed loop: each client sends its next request when its last is answered, over"
        " /v1/completions, streamed; every server was started anew for every load, in turns, and"
        " warmed up with other prompts, one for each client; no prompt was sent to a server twice",
        f"requests decoded together: {slots}; prefix caches off",
        *result.notes,
    ]


# The tables


def _load(result: LoadResult, summary: pd.DataFrame) -> Section:
    """Everybody at every number of clients, the fastest first within each group."""
    place = summary["group"].map({group: number for number, group in enumerate(result.groups)})
    frame = summary.assign(place=place).sort_values(
        ["clients", "place", "tokens_per_second"], ascending=[True, True, False]
    )
    frame = frame.drop(columns="place").reset_index(drop=True)
    best = {
        (clients, row.group, row.name)
        for clients in result.clients
        for group in result.groups
        if (row := result.best(clients, group)) is not None
    }
    keys = zip(frame["clients"], frame["group"], frame["contestant"], strict=True)
    columns = _columns(result)
    return Section(
        key="load",
        title="Throughput and latency by the number of clients",
        note="Tokens a second of all clients together while all of them wait: their number over the"
        " mean seconds a token of a request. TTFT: from sending a request to its first text, TPOT:"
        " from there to the last, for each further token; both by the client's clock, median and"
        " 95th percentile. Ratios of tokens a second, with 95 % bootstrap intervals over requests"
        " and repeats, in pairs; requests at the same time are not independent, so intervals of"
        " many clients are too narrow rather than too wide. A group's best is its fastest row on"
        " these requests. Equal texts are those of autoregressive decoding in our server"
        f" ({result.pair.runner.target_dtype}).",
        frame=frame,
        shown=cells.table(frame, columns),
        figure=load_figure(summary, "Throughput against latency"),
        marked=tuple(number for number, key in enumerate(keys) if key in best),
        ruled=cells.group_ends(frame["clients"]),
        brief=[heading for heading in columns if heading not in ("TPOT p95", "equal texts")],
    )


def _columns(result: LoadResult) -> dict[str, Cell]:
    against = {"over our autoregressive": "over_autoregressive"}
    against |= {f"over {group}'s best": f"over_{group}" for group in result.groups if group != OURS}
    return {
        "clients": cells.text("clients"),
        "contestant": cells.text("contestant"),
        "tokens/s": cells.number("tokens_per_second", ".0f"),
        "TTFT ms": _milliseconds("ttft_median"),
        "TTFT p95": _milliseconds("ttft_p95"),
        "TPOT ms": _milliseconds("tpot_median"),
        "TPOT p95": _milliseconds("tpot_p95"),
        "errors": cells.count("errors"),
        **{
            heading: cells.ratio(name, f"{name}_low", f"{name}_high")
            for heading, name in against.items()
        },
        "equal texts": lambda row: f"{row['equal']:.0f} of {row['compared']:.0f}",
    }


def _milliseconds(name: str) -> Cell:
    """A column of seconds, to three digits."""

    def cell(row: cells.Row) -> str:
        milliseconds = 1e3 * row[name]
        return cells.as_number(milliseconds, ".1f" if milliseconds < 100 else ".0f")

    return cell


def _errors(result: LoadResult) -> Iterator[Section]:
    """What failed, if anything did: how often and why."""
    frame = requests_frame(result)
    failed = frame[frame["error"].notna()]
    if not len(failed):
        return
    counted = failed.groupby(["clients", "contestant", "error"], as_index=False).size()
    yield Section(
        key="errors",
        title="Errors",
        note="Requests that failed; they count neither in speeds nor in times.",
        frame=counted,
        shown=cells.everything(counted),
    )


# MLflow


def _rows(result: LoadResult, summary: pd.DataFrame) -> Iterator[Run]:
    """A nested run a contestant, its metrics by the number of clients."""
    for row in result.rows:
        mine = summary[(summary["group"] == row.group) & (summary["contestant"] == row.name)]
        tags = {
            "group": row.group,
            "version": row.version,
            "lossless": str(row.lossless).lower(),
            "temperature": "0",
        }
        if row.configuration is not None:
            tags["config_id"] = row.configuration.id
            tags["mlflow.note.content"] = note(row.configuration)
        yield Run(
            name=f"{row.group}: {row.name}, under load",
            params=row.settings,
            metrics={name: _by_clients(mine, name) for name in METRICS},
            tags=tags,
        )


def _by_clients(rows: pd.DataFrame, name: str) -> dict[int, float]:
    known = rows[rows[name].notna()]
    return dict(zip(known["clients"].astype(int), known[name].astype(float), strict=True))


def _clients(count: int) -> str:
    return f"{count} client{'s' if count > 1 else ''}"
