"""A sweep of a server: the champion, the race at each load, and the settings that were raced."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from dashboards import cells
from dashboards.reports.contestants import contestants, origin, report_tags
from dashboards.reports.load import TIMES, by_load, how_measured, nested_runs
from dashboards.reports.sentences import sentences
from dashboards.sections import Report, Section
from specdec_core.evidence.load.result import LoadRow, requests_frame, summary_frame
from specdec_core.evidence.server_choice import ServerRace, ServerSweep
from specdec_core.measure.comparison import over
from specdec_core.search.load.workload import Load


def report(result: ServerSweep) -> Report:
    race, champion = result.race, result.configurations[result.champion]
    summary = _summary(result, race)
    plain = race.autoregressive()
    ratios = [
        (load, over(result.winner, result.deciding.autoregressive(), load)) for load in race.loads
    ]
    return Report(
        command="sweep",
        title=f"{result.title} with {race.pair.name}",
        origin=origin(
            race,
            [*how_measured(race), *_ranking(result)],
            server=result.server,
            version=plain.version,
            clients=",".join(load.key for load in race.loads),
        ),
        findings=[*_findings(result)],
        parts=[
            *_tables(result, summary),
            Section(key="start", title="Start the champion", lines=_start(result)),
            contestants(race.rows),
            sentences([(result.champion, champion)]),
        ],
        frames={"requests": requests_frame(race)},
        run_name=f"sweep {race.name}",
        metrics=by_load((load, "speedup", ratio.value) for load, ratio in ratios)
        | by_load((load, "speedup_low", ratio.low) for load, ratio in ratios),
        tags={**report_tags(race), "server": result.server, "server_version": plain.version},
        nested=list(nested_runs(race, summary)),
    )


def _findings(result: ServerSweep) -> Iterator[str]:
    """The champion, its speed at each load, and what lost its race."""
    race, winner = result.deciding, result.winner
    plain = race.autoregressive()
    yield f"champion of {result.title}: {result.champion}"
    for load in race.loads:
        speed = f"{load}: {winner.tokens_per_second(load):.0f} tokens/s"
        if winner is plain:
            yield f"{speed}, without speculation"
            continue
        against = [f"{cells.of_ratio(over(winner, plain, load))} over no speculation"]
        default = _default(result.race, load)
        if default is not None and default.name != winner.name and result.table is None:
            ratio = cells.of_ratio(over(winner, default, load))
            against.append(f"{ratio} over {default.name}, the server's best default")
        yield f"{speed}, {', '.join(against)}"
    for load in race.loads:
        if (name := result.best[load.key]) != result.champion:
            yield f"{load}: {name} was the fastest in the race of all modes"
    for row in result.race.rows:
        if failed := [load.label for load in race.loads if row.errors(load)]:
            yield f"{row.name}: requests failed with {', '.join(failed)}; it cannot be champion"


def _default(race: ServerRace, load: Load) -> LoadRow | None:
    """The fastest of the server's own modes that speculate, if one did not fail."""
    own = [r for r in race.rows if not (r.with_ours or r.autoregressive or r.errors(load))]
    return max(own, key=lambda row: row.tokens_per_second(load), default=None)


def _start(result: ServerSweep) -> list[str]:
    lines = [*result.usage.splitlines()]
    return lines + ([f"as it was started here: {result.command}"] if result.command else [])


def _ranking(result: ServerSweep) -> list[str]:
    """How the finalists were found."""
    left_out = f"; without settings there: {', '.join(result.left_out)}" if result.left_out else ""
    return [
        f"{result.ranked} settings were ranked at each load by replay of {result.recording} and"
        f" simulation with the step costs of {result.times}{left_out}",
        "a mode that was shown to be slower than another one under a load had no further runs"
        " under it; the champion is slower than no speculation at no load",
    ]


def _summary(result: ServerSweep, race: ServerRace) -> pd.DataFrame:
    """The race's numbers, with the tokens a second that were expected."""
    summary = summary_frame(race)
    expected = [
        result.expected.get(name, {}).get(load)
        for name, load in zip(summary["contestant"], summary["load"], strict=True)
    ]
    return summary.assign(expected=pd.array(expected, dtype="Float64"))


def _tables(result: ServerSweep, summary: pd.DataFrame) -> Iterator[Section]:
    yield _table(result, summary, "race", "The race at each load")
    if result.table is not None:
        yield _table(result, _summary(result, result.table), "table", "The race of lengths by load")


def _table(result: ServerSweep, summary: pd.DataFrame, key: str, title: str) -> Section:
    """Each mode under every load, the fastest first."""
    ordered = summary.sort_values(["clients", "tokens_per_second"], ascending=[True, False])
    frame = ordered.reset_index(drop=True)
    columns = {
        "clients": cells.count("clients"),
        "mode": cells.text("contestant"),
        "tokens/s": cells.number("tokens_per_second", ".0f"),
        "expected": cells.number("expected", ".0f"),
        "over no speculation": cells.ratio("over_autoregressive"),
        "TTFT ms": cells.number("ttft_median", ".1f", 1e3),
        "TPOT ms": cells.number("tpot_median", ".1f", 1e3),
        "errors": cells.count("errors"),
        "equal texts": lambda row: f"{row['equal']:.0f} of {row['compared']:.0f}",
    }
    return Section(
        key=key,
        title=title,
        note="Tokens a second of all clients together while all of them wait; expected: by replay"
        f" and simulation. {TIMES} Equal texts are those of the server without speculation.",
        frame=frame,
        shown=cells.table(frame, columns),
        marked=[n for n, name in enumerate(frame["contestant"]) if name == result.champion],
        ruled=cells.group_ends(frame["load"]),
        brief=[name for name in columns if name != "equal texts"],
    )
