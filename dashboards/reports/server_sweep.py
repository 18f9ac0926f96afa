"""A sweep of a server: the champion, the race at each load, and the settings that were raced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pandas as pd

from dashboards import cells
from dashboards.reports.contestants import contestants, origin, report_tags
from dashboards.reports.load import TIMES, by_load, how_measured, nested_runs
from dashboards.reports.sentences import sentences
from dashboards.sections import Report, Section
from specdec_core.evidence.load.result import LoadRow, requests_frame, summary_frame
from specdec_core.evidence.server_choice import LOSS, ServerRace, ServerSweep
from specdec_core.measure.comparison import FOLDS, over
from specdec_core.search.load.workload import Load


def report(result: ServerSweep) -> Report:
    race, summary = result.race, _summary(result, result.race)
    plain, champion, crossed = race.autoregressive(), result.configuration, result.crossed
    ratios = [(load, over(crossed, plain, load)) for load in race.loads]
    return Report(
        command="sweep",
        title=f"The fastest settings of {result.title} for {race.pair.name}",
        origin=origin(
            race,
            [*how_measured(race), *_ranking(result)],
            server=result.server,
            version=plain.version,
            clients=",".join(load.key for load in race.loads),
        ),
        findings=[*_findings(result)],
        parts=[
            _table(result, summary, "race", "The race at each load"),
            Section(key="start", title="Start the champion", lines=_start(result)),
            *_first_runs(result),
            contestants(race.rows),
            *([] if champion is None else [sentences([(result.champion, champion)])]),
        ],
        frames={"requests": _requests(result)},
        metrics=by_load((load, "speedup", ratio.value) for load, ratio in ratios)
        | by_load((load, "speedup_low", ratio.low) for load, ratio in ratios),
        tags={**report_tags(race), "server": result.server, "server_version": plain.version},
        nested=list(nested_runs(race, summary)),
    )


def _first_runs(result: ServerSweep) -> Iterator[Section]:
    if result.first is not None:
        summary = _summary(result, result.first)
        yield _table(result, summary, "first", "First runs, which corrected the ranking")


def _requests(result: ServerSweep) -> pd.DataFrame:
    """The requests of all races."""
    races = {"first runs": result.first, "race": result.race}
    frames = [
        requests_frame(race).assign(race=name) for name, race in races.items() if race is not None
    ]
    return pd.concat(frames, ignore_index=True)


def _findings(result: ServerSweep) -> Iterator[str]:
    """The champion, its speed at each load, and what lost its race."""
    race, winner, crossed = result.race, result.winner, result.crossed
    plain = race.autoregressive()
    yield f"champion of {result.title}: {result.champion}"
    for load in race.loads:
        speed = f"{load}: {winner.tokens_per_second(load):.0f} tokens/s"
        if winner is plain:
            yield f"{speed}, without speculation"
            continue
        against = [f"{cells.of_ratio(over(crossed, plain, load))} over no speculation"]
        default = _default(race, plain, load)
        if default is not None and default is not winner:
            ratio = cells.of_ratio(over(crossed, default, load))
            against.append(f"{ratio} over {default.name}, the server's best default")
        yield f"{speed}, {', '.join(against)}"
    for name, times in Counter(row.name for row in crossed.chosen).items():
        if name != winner.name:
            yield (
                f"{name} would be the champion in {times} of {FOLDS} checks that each leave out a"
                " sixth of the requests"
            )
    for load in race.loads:
        if (name := result.best[load.key]) != result.champion:
            yield f"{load}: {name} was the fastest"
    for row in race.rows:
        if failed := [load.label for load in race.loads if row.errors(load)]:
            yield f"{row.name}: requests failed with {', '.join(failed)}; it cannot be champion"
    for name in sorted(race.with_other_texts()):
        yield f"{name}: float32 texts unequal to those without speculation; it cannot be champion"
    if result.configuration is None:
        yield (
            f"{result.champion} is the server's own mode, which no configuration of this library"
            " stands for: it is not registered"
        )


def _default(race: ServerRace, plain: LoadRow, load: Load) -> LoadRow | None:
    """The fastest of the server's own modes that speculate, if one did not fail."""
    own = [r for r in race.rows if not (r.with_ours or r.autoregressive or r.errors(load))]
    return max(own, key=lambda row: over(row, plain, load).value, default=None)


def _start(result: ServerSweep) -> list[str]:
    return [*result.usage.splitlines(), f"as it was started here: {result.command}"]


def _ranking(result: ServerSweep) -> list[str]:
    """How the finalists were found."""
    left_out = f"; without settings there: {', '.join(result.left_out)}" if result.left_out else ""
    corrected = []
    if result.first is not None:
        corrected.append(
            "what a round of each way to draft takes longer while the server serves was added to"
            f" the simulation, by first runs of {len(result.first.rows)} modes; they do not count"
            " in the race"
        )
    return [
        f"{result.ranked} settings were ranked at each load by replay of {result.recording} and"
        f" simulation with the step costs of {result.times}{left_out}",
        *corrected,
        "the race has other prompts than the recording"
        if result.others_raced
        else "the race has prompts of the recording, because the source has no further ones",
        "the champion was chosen on all requests; its ratios are of requests that it was not chosen"
        f" on: of each of {FOLDS} parts, by what is the best on the others",
        "a mode that was shown to be slower than another one at a load had no further runs there;"
        f" at no load is the champion more than {LOSS:.0%} slower than no speculation or than the"
        " best of the server's own modes",
    ]


def _summary(result: ServerSweep, race: ServerRace) -> pd.DataFrame:
    """A race's numbers, with the tokens a second that were expected."""
    summary = summary_frame(race)
    expected = [
        result.expected.get(name, {}).get(load)
        for name, load in zip(summary["contestant"], summary["load"], strict=True)
    ]
    return summary.assign(expected=pd.array(expected, dtype="Float64"))


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
