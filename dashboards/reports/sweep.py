"""A sweep: its champion, every configuration, figures, and what a careful reader has to know."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from dashboards import cells
from dashboards.figures.frontier import frontier
from dashboards.figures.sweep import speedups, time_per_token
from dashboards.ranking import champion, ranked, speedup
from dashboards.reports.heads import reliability
from dashboards.reports.load_choice import loads, served, simulation
from dashboards.reports.standings import standings, timed_sentences
from dashboards.sections import Report, ReportOrigin, Section
from specdec_core.base.errors import UserError
from specdec_core.search.load.result import LoadChoice
from specdec_core.search.results import METRIC, RaceSummary, ReplaySummary, SweepResult, Timing

if TYPE_CHECKING:
    from specdec_core.drafting.heads.card import HeadCard

TABLE_ROWS = 300


def report(result: SweepResult) -> Report:
    """The report of a sweep."""
    warnings, choice = list(caveats(result)), result.under_load
    first = [
        Section(key="caveats", title="Before you quote this", lines=warnings, style="caveats"),
        timed_sentences(result),
    ]
    return Report(
        command="sweep",
        title=headline(result),
        origin=ReportOrigin(name=result.name, pair=result.pair.name, started=result.started),
        parts=[
            *(section for section in first if section.lines),
            *((served(choice), loads(choice), *simulation(choice)) if choice is not None else ()),
            standings(result, TABLE_ROWS, "sweep.json"),
            *drawn(result),
            Section(key="facts", title="What was measured, and on what", terms=dict(facts(result))),
        ],
    )


def drawn(result: SweepResult) -> list[Section]:
    """All figures of a sweep and of its heads."""
    sections = [
        Section.drawn("frontier", frontier(result)),
        Section.drawn("speedups", speedups(result)),
        Section.drawn("time", time_per_token(result)),
    ]
    if heads := _cards(result):
        sections.append(reliability(heads))
    return sections


def _cards(result: SweepResult) -> dict[str, HeadCard]:
    """The cards of the heads in a sweep, without heads that are gone."""
    loaded: dict[str, HeadCard] = {}
    configurations = [trial.configuration for trial in result.trials]
    if names := dict.fromkeys(head for each in configurations for _, head in each.heads):
        from specdec_core.drafting.heads.storage import load_card  # torch takes seconds to import

        for name in names:
            with suppress(UserError):
                loaded[name] = load_card(name)
    return loaded


def headline(result: SweepResult) -> str:
    if result.champion is None:
        return "No champion yet: nothing was timed"
    if result.under_load is not None and result.under_load.timed:
        return _over_loads(result.under_load)
    best = champion(result)
    if best is None:
        return "Nothing beats autoregressive decoding here"
    gain, name = speedup(result, best), result.labels[best.id]
    if gain.timing is None:
        where = f" on {result.hardware}" if result.hardware else ""
        return f"{name} is an estimated {gain.value:.2f}× as fast as autoregressive decoding{where}"
    if gain.timing.low <= 1 <= gain.timing.high:
        return f"{name} cannot be told from autoregressive decoding ({gain.value:.2f}×)"
    return f"{name} is {gain.value:.2f}× as fast as autoregressive decoding"


def _over_loads(choice: LoadChoice) -> str:
    """What is served, at the smallest and the largest load."""
    if choice.chosen.drafter is None:
        return "Nothing beats autoregressive decoding here, at any load"
    gains = [
        f"{cells.as_number(row.speedup, '.2f×')} with {load.label}"
        for load, row in choice.served().items()
    ]
    ends = list(dict.fromkeys([gains[0], gains[-1]]))
    return f"{choice.chosen.label}: {' and '.join(ends)}, over autoregressive decoding"


def facts(result: SweepResult) -> Iterator[tuple[str, str]]:
    """What was measured, on what, with what."""
    pair, profile, environment = result.pair, result.profile, result.environment
    yield "target", f"{pair.target} ({profile.target_dtype})"
    drafts = ", ".join(f"{name} = {model}" for name, model in pair.drafts.items())
    yield "drafts", f"{drafts} ({profile.draft_dtype})" if drafts else "none"
    yield (
        "prompts",
        f"{result.prompts.count} from {result.prompts.label}, digest {result.prompts.digest[:12]}",
    )
    yield "decoding", f"{decoding(result)}, at most {result.max_new_tokens} new tokens"
    if result.hardware:
        yield "forward times", f"of {result.hardware}, from a file; nothing was timed here"
    else:
        threads = "1 thread" if profile.threads == 1 else f"{profile.threads} threads"
        yield "device", f"{profile.device}, {threads}"
    if result.replay is not None:
        yield "replay", replayed(result.replay)
    yield "lossless", lossless(result)
    yield from environment.items()


def replayed(replay: ReplaySummary) -> str:
    """How many configurations were replayed, how fast, and how many forwards that saved."""
    line = f"{replay.configurations:,} configurations"
    if replay.per_second:  # a resumed sweep may have counted all of them before
        line += f", {replay.per_second:,.0f} a second"
    line += (
        f"; saved {replay.n_draft:,} draft and {replay.n_target:,} target forwards "
        f"({replay.recording})"
    )
    if replay.checked:
        line += f"; live counts equal for {replay.equal} of {replay.checked} timed"
        if replay.deviation:
            line += f", the others' forwards within {replay.deviation:.1%}"
    return line


def decoding(result: SweepResult) -> str:
    """How tokens are chosen, in words."""
    ways = []
    for sampling in {t.configuration.sampling: None for t in result.trials}:
        parts = ["greedy" if sampling.greedy else f"sampling, temperature {sampling.temperature:g}"]
        parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
        parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
        rule = "coupled by shared noise" if sampling.coupling == "gumbel" else "by rejection"
        parts += [] if sampling.greedy else [f"accepted {rule}"]
        ways.append(", ".join(parts))
    return "; ".join(ways) or "greedy"


def lossless(result: SweepResult) -> str:
    if result.champion is not None and not result.served.configuration.lossless:
        return "no: what is served is a lossy method, allowed by name"
    return (
        "yes: a candidate is kept with probability min(1, p/q) and else replaced by a draw from "
        "norm(max(p − q, 0)), which keeps the target's distribution; greedy output is "
        "the target's own up to rounding"
    )


def caveats(result: SweepResult) -> Iterator[str]:
    """What a careful reader has to know before quoting the headline."""
    if result.under_load is not None:
        yield (
            "The served configuration was chosen for many requests at once, whose times are in the"
            " sections on loads. The table of all configurations with its ★, and the figures, are"
            " about one request at a time."
        )
    yield from _about_champion(result)
    yield from _about_outputs(result)
    yield from _about_estimates(result)
    if any(t.configuration.asynchronous for t in ranked(result)):
        yield (
            "What the rounds of PEARL do depends on timing, so other runs count other rounds. Its"
            " estimated speedups are those of the runs that counted it."
        )
    stopped = sum(not t.finished for t in ranked(result))
    if stopped:
        yield f"{stopped} configurations were stopped early; their counts cover fewer prompts."
    for name, cost in {"target": result.profile.target, **result.profile.drafts}.items():
        if cost.r2 < 0.9:
            yield f"The fit of the forward times of {name} is poor (R² {cost.r2:.2f})."
    if result.prompts.count < 20:
        yield f"{result.prompts.count} prompts are few; others may rank close ones differently."


def _about_champion(result: SweepResult) -> Iterator[str]:
    trials = ranked(result)
    tied = [result.labels[t.config_id] for t in result.timings if t.tied_with_champion]
    if result.champion is not None and tied:
        yield f"Not shown to be slower than the champion: {', '.join(tied)}."
    if result.race is not None:
        yield race_sentence(result.race)
    lossy = [t for t in trials if not t.configuration.lossless]
    if lossy:
        yield (
            f"{len(lossy)} of {len(trials)} configurations are lossy: they do not keep the "
            "target's distribution, and none is the best unless it was allowed by name; "
            "`specdec lab drift` measures by how much."
        )


def race_sentence(race: RaceSummary) -> str:
    """What the choice of the champion may cost, and what it rests on."""
    most = "an amount not known yet" if race.at_most is None else f"{race.at_most:.1%}"
    return (
        f"The champion is expected to be {race.loss:.1%} slower than the fastest finalist, and at"
        f" most {most} (95 %), after {race.laps} times {race.prompts} prompts; at most"
        f" {race.within:.0%} was asked for."
    )


def _about_outputs(result: SweepResult) -> Iterator[str]:
    differing = [
        f"{t.differing_outputs} of {len(t.tokens)} ({result.labels[t.config_id]})"
        for t in result.timings
        if t.differing_outputs
    ]
    if differing:
        dtype = result.profile.target_dtype
        yield (
            f"Greedy outputs that differ from autoregressive decoding's: {', '.join(differing)}. "
            "Verifying several tokens at once rounds differently than one at a time, "
            f"and in {dtype} "
            + ("that should not flip a token." if dtype == "float32" else "near-ties can flip.")
        )
    replay = result.replay
    if replay is not None and replay.equal < replay.checked:
        yield (
            f"Of {replay.checked} finalists that were decoded to be timed, "
            f"{replay.checked - replay.equal} had other counts than the replay, their forwards "
            f"within {replay.deviation:.1%}: near-ties between tokens flip, because a token is "
            "verified in a forward of another width."
        )


def _about_estimates(result: SweepResult) -> Iterator[str]:
    timings, count = result.timings, len(ranked(result))
    if result.hardware:
        constant = len(result.profile.target.measurements) == 1
        yield (
            f"Ranked for {result.hardware} by its forward times: all speedups are estimates"
            + (", in which a forward takes the same time whatever its width." if constant else ".")
        )
    elif len(timings) < count:
        text = (
            f"{len(timings)} of {count} configurations were timed. All other speedups (≈) are "
            "estimates: counts times the profile's forward times, the prefill, and what the timed "
            "configurations of the same family took beyond that"
        )
        errors = [error for t in timings if not math.isnan(error := _estimate_error(result, t))]
        if errors:
            text += f", off by {np.median(errors):.0%} (median) for those that were timed"
        yield text + "."


def _estimate_error(result: SweepResult, timing: Timing) -> float:
    estimate = result.trial(timing.config_id).metrics.get(METRIC, math.nan)
    return abs(estimate / timing.speedup - 1)
