"""One self-contained HTML report of a sweep: no network, one file to send around."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from plotly.offline import get_plotlyjs

from dashboards import figures, look
from dashboards.ranking import (
    best_of,
    champion,
    contenders,
    draft_of,
    family,
    label,
    ranked,
    speedup,
)
from specdec_core.errors import UserError
from specdec_core.files import write_atomically
from specdec_core.results import SweepResult, Timing, Trial
from specdec_core.stats import Ratio, paired_ratio

if TYPE_CHECKING:
    from dashboards.evidence import Evidence
    from specdec_core.heads import HeadCard

TABLE_ROWS = 300


def write_report(result: SweepResult, folder: Path, traces: Path | None = None) -> Path:
    """Write `<folder>/report.html` from the result and the folder's rounds.parquet; returns its
    path. With `traces`, the recording that the sweep replayed, the report has a section on what it
    says. Raises UserError where the rounds are missing, or the recording is missing or broken."""
    folder = Path(folder)
    source = folder / "rounds.parquet"
    if not source.is_file():
        raise UserError(f"{source}: no such file; a finished sweep leaves its rounds there")
    timed = [t.config_id for t in (result.autoregressive, *result.timings) if t is not None]
    shown = list(dict.fromkeys([*(trial.id for trial in contenders(result)), *timed]))
    rounds = pd.read_parquet(source, filters=[("config_id", "in", shown)] if shown else None)
    evidence = None
    if traces is not None:
        from dashboards.evidence import gather  # torch takes seconds to import

        evidence = gather(result, traces)
    return write_atomically(folder / "report.html", render(result, rounds, evidence))


def render(result: SweepResult, rounds: pd.DataFrame, evidence: Evidence | None = None) -> str:
    """The report as HTML. `rounds` has the columns config_id, request_id, round and those of
    :class:`specdec_core.stats.Round`."""
    sections = draw(result, rounds, evidence)
    return template("report.jinja").render(
        result=result,
        headline=headline(result),
        summary=summary(result),
        tiles=list(tiles(result)),
        facts=list(facts(result)),
        caveats=list(caveats(result)),
        rows=table(result, TABLE_ROWS),
        rows_left_out=max(0, len(ranked(result)) - TABLE_ROWS),
        metrics=METRICS,
        sections=[
            (heading, [embed(name, drawing) for name, drawing in drawings.items()])
            for heading, drawings in sections.items()
            if drawings
        ],
        neutral=[look.INK, look.MUTED, look.PAPER],
        plotly=get_plotlyjs(),
    )


# ------------------------------------------------------------------------------------ what is drawn


class Drawing(NamedTuple):
    """A figure and the table that belongs to it, if any."""

    figure: go.Figure
    table: pd.DataFrame | None = None


def draw(
    result: SweepResult, rounds: pd.DataFrame, evidence: Evidence | None = None
) -> dict[str, dict[str, Drawing]]:
    """All figures of a sweep by name, in sections by heading."""
    sweep = {
        "frontier": Drawing(figures.frontier(result)),
        "speedups": Drawing(figures.speedups(result)),
        "time": Drawing(figures.time_per_token(result)),
        "accepted": Drawing(figures.accepted_lengths(result, rounds)),
        "lengths": Drawing(figures.lengths_over_position(result, rounds)),
    }
    if max(m.width for m in result.profile.target.measurements) > 1:  # else not measured
        sweep["forwards"] = Drawing(figures.forward_times(result))
    generations = figures.generation_times(result, rounds)
    regressed = figures.regression_table(generations)
    if len(regressed):
        sweep["regression"] = Drawing(figures.time_regression(generations), regressed)
    return {
        "": sweep,
        "The trained heads": draw_heads(cards(result), result),
        "What the traces say": draw_traces(evidence) if evidence is not None else {},
    }


def draw_heads(
    cards: Mapping[str, HeadCard], result: SweepResult | None = None
) -> dict[str, Drawing]:
    """Table 3 of SpecDec++ for trained heads, with the best thresholds where a sweep used them."""
    if not cards:
        return {}
    frame = figures.heads_frame(cards, result)
    return {"heads": Drawing(figures.heads_heatmap(frame), figures.heads_table(frame))}


def draw_traces(evidence: Evidence) -> dict[str, Drawing]:
    """What a recording says about drafts and policies."""
    drawn = {}
    if evidence.distances is not None and len(evidence.distances):
        drawn["oracle"] = Drawing(figures.length_errors(evidence.distances))
    if evidence.runs:
        drawn["utilisation"] = Drawing(
            figures.utilisation_over_time(evidence.runs, evidence.families)
        )
    if evidence.prefixes:
        drawn["confidence"] = Drawing(figures.acceptance_by_confidence(evidence.prefixes))
    if evidence.tokens:
        drawn["entropy"] = Drawing(
            figures.entropy_by_outcome(evidence.tokens), figures.entropy_table(evidence.tokens)
        )
        own = evidence.tokens[evidence.draft]
        drawn["bounds"] = Drawing(figures.acceptance_bounds(own, evidence.draft))
        with suppress(ValueError):  # a draft that is the target has no ratio to fit
            drawn["ratio"] = Drawing(figures.ratio_of_entropies(own, evidence.draft))
    return drawn


def cards(result: SweepResult) -> dict[str, HeadCard]:
    """The cards of the heads in a sweep that are still there."""
    found: dict[str, HeadCard] = {}
    if names := figures.head_names(result):
        from specdec_core.heads import load_card  # torch takes seconds to import

        for name in names:
            with suppress(UserError):
                found[name] = load_card(name)
    return found


def template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def embed(name: str, drawing: Drawing) -> dict[str, Any]:
    """A figure's title and subtitle as text of the page, which wraps, and the rest as JSON."""
    fig = drawing.figure
    title, subtitle = fig.layout.title.text, fig.layout.title.subtitle.text
    fig = go.Figure(fig).update_layout(title=None, margin_t=24)
    document = json.loads(fig.to_json())
    # "<" in a script element could end it
    text = json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")
    return {
        "name": name, "title": title, "subtitle": subtitle, "json": text,
        "height": fig.layout.height,
        "columns": [] if drawing.table is None else list(drawing.table.columns),
        "rows": [] if drawing.table is None else [
            [_cell(value) for value in row] for row in drawing.table.itertuples(index=False)
        ],
    }  # fmt: skip


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.3f}" if value % 1 else f"{value:g}"
    return str(value)


# ----------------------------------------------------------------------------------- what is said


def headline(result: SweepResult) -> str:
    if result.champion is None:
        return "No champion yet: nothing was timed"
    best = champion(result)
    if best is None:
        return "Nothing beats autoregressive decoding here"
    gain, name = speedup(result, best), label(best)
    if gain.timing is None:
        return f"{name} is an estimated {gain.value:.2f}× as fast as autoregressive decoding"
    if gain.timing.low <= 1 <= gain.timing.high:
        return f"{name} cannot be told from autoregressive decoding ({gain.value:.2f}×)"
    return f"{name} is {gain.value:.2f}× as fast as autoregressive decoding"


def summary(result: SweepResult) -> str:
    """Pair, prompts, hardware, versions and losslessness in a line."""
    environment, profile = result.environment, result.profile
    machine = environment.get("gpu") or environment.get("cpu") or profile.device
    libraries = [
        f"{name} {environment[name]}"
        for name in ("torch", "transformers", "ray")
        if name in environment
    ]
    best = champion(result)
    return " · ".join([
        f"{Path(result.pair.target).name} with {', '.join(result.pair.drafts) or 'no draft'}",
        f"{result.prompts.count} prompts of {Path(result.prompts.source).name}",
        f"{decoding(result)}, at most {result.max_new_tokens} new tokens",
        f"{profile.target_dtype} on {machine}, {threads(result)}",
        *([", ".join(libraries)] if libraries else []),
        "lossless" if best is None or best.configuration.lossless else "not lossless",
    ])  # fmt: skip


def threads(result: SweepResult) -> str:
    count = result.profile.threads
    return f"{count} thread" + ("s" if count != 1 else "")


def tiles(result: SweepResult) -> Iterator[tuple[str, str, str]]:
    """(what, value, note) of the champion, the most important first."""
    best = champion(result)
    if best is None:
        return
    gain = speedup(result, best)
    if gain.timing:
        interval = f"95 %: {gain.timing.low:.2f}–{gain.timing.high:.2f}"
    else:
        interval = "estimated from the profile, not timed"
    yield "speedup", f"{gain.value:.2f}×", interval
    if gain.timing and result.autoregressive:
        yield (
            "tokens per second",
            f"{gain.timing.tokens_per_second:,.0f}",
            f"autoregressive {result.autoregressive.tokens_per_second:,.0f}",
        )
    fixed = best_of(result, "fixed")
    if fixed is not None and fixed.id != best.id:
        ratio = against(result, best, fixed)
        note = label(fixed)
        if ratio is None:
            value = gain.value / speedup(result, fixed).value
            yield "over the best fixed K", f"≈ {value - 1:+.0%}", f"{note}, estimated"
        else:
            note += f"; interval {ratio.low - 1:+.1%} to {ratio.high - 1:+.1%}"
            yield "over the best fixed K", f"{ratio.value - 1:+.1%}", note
    oracle = next((o for o in result.oracles if o.draft == draft_of(result, best)), None)
    if oracle is not None and oracle.speedup > 0:
        yield (
            "of the oracle",
            f"{gain.value / oracle.speedup:.0%}",
            f"with the same draft at most {oracle.speedup:.2f}×",
        )
    metrics = best.metrics
    yield "MAT", f"{metrics['mat']:.2f}", "output tokens per target forward"
    yield (
        "accepted / drafted",
        f"{metrics['acceptance_rate']:.0%}",
        f"{metrics['discard_rate']:.2f} thrown away per output token",
    )


def against(result: SweepResult, trial: Trial, other: Trial) -> Ratio | None:
    """How many times faster `trial` is than `other`, both timed on the same prompts. Where their
    outputs differ in length, for the same number of tokens."""
    mine, theirs = (speedup(result, t).timing for t in (trial, other))
    if mine is None or theirs is None:
        return None
    lengths = np.array(theirs.tokens) / np.maximum(mine.tokens, 1)
    return paired_ratio(np.array(theirs.seconds), np.array(mine.seconds) * lengths)


def facts(result: SweepResult) -> Iterator[tuple[str, str]]:
    """What was measured, on what, with what."""
    pair, profile, environment = result.pair, result.profile, result.environment
    yield "target", f"{pair.target} ({profile.target_dtype})"
    drafts = ", ".join(f"{name} = {model}" for name, model in pair.drafts.items())
    yield "drafts", f"{drafts} ({profile.draft_dtype})" if drafts else "none"
    yield (
        "prompts",
        f"{result.prompts.count} from {result.prompts.source}, digest {result.prompts.digest[:12]}",
    )
    yield "decoding", f"{decoding(result)}, at most {result.max_new_tokens} new tokens"
    yield "device", f"{profile.device}, {threads(result)}"
    yield "lossless", lossless(result)
    yield from environment.items()


def decoding(result: SweepResult) -> str:
    """How tokens are chosen, in words."""
    ways = []
    for sampling in {t.configuration.sampling: None for t in result.trials}:
        parts = ["greedy" if sampling.greedy else f"sampling, temperature {sampling.temperature:g}"]
        parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
        parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
        ways.append(", ".join(parts))
    return "; ".join(ways) or "greedy"


def lossless(result: SweepResult) -> str:
    best = champion(result)
    if best is not None and not best.configuration.lossless:
        return "no: the champion is a lossy method, allowed by name"
    return (
        "yes: a candidate is kept with probability min(1, p/q) and else replaced by a draw from "
        "norm(max(p − q, 0)), which leaves the target's distribution as it is; greedy output is "
        "the target's own up to rounding"
    )


def caveats(result: SweepResult) -> Iterator[str]:
    """What a careful reader has to know before quoting the headline."""
    timings = result.timings
    trials = ranked(result)
    labels = {t.id: label(t) for t in trials}
    if result.champion is not None:
        tied = [labels[t.config_id] for t in timings if t.tied_with_champion]
        if tied:
            yield f"Tied with the champion on these prompts: {', '.join(tied)}."
    differing = [
        f"{t.differing_outputs} of {len(t.tokens)} ({labels[t.config_id]})"
        for t in timings
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
    errors = [error for t in timings if not math.isnan(error := _estimate_error(result, t))]
    if len(timings) < len(trials):
        text = (
            f"{len(timings)} of {len(trials)} configurations were timed. The others' speedups (≈) "
            "are estimates: their counts times the profile's forward times"
        )
        if errors:
            text += f", off by {np.median(errors):.0%} (median) for those that were timed"
        yield text + "."
    stopped = sum(not t.finished for t in trials)
    if stopped:
        yield f"{stopped} configurations were stopped early; their counts cover fewer prompts."
    for name, cost in {"target": result.profile.target, **result.profile.drafts}.items():
        if cost.r2 < 0.9:
            yield f"The fit of the forward times of {name} is poor (R² {cost.r2:.2f})."
    if result.prompts.count < 20:
        yield f"{result.prompts.count} prompts are few; others may rank close ones differently."


def _estimate_error(result: SweepResult, timing: Timing) -> float:
    estimate = result.trial(timing.config_id).metrics.get("estimated_speedup", math.nan)
    return abs(estimate / timing.speedup - 1)


# ------------------------------------------------------------------------------------------ table

METRICS = {  # column -> (heading, what it says)
    "verification_rate": ("verif. rate", "target forwards per output token"),
    "discard_rate": ("discard rate", "thrown-away draft tokens per output token"),
    "mat": ("MAT", "output tokens per target forward"),
    "acceptance_rate": ("acceptance", "accepted / drafted tokens"),
    "utilisation": ("util.", "output tokens per draft forward"),
}


def table(result: SweepResult, most: int | None = None) -> list[dict[str, Any]]:
    """One row a configuration, as shown: the champion, those timed, those estimated; the `most`
    fastest."""
    rows = []
    for trial in ranked(result)[:most]:
        gain = speedup(result, trial)
        if trial.id == result.champion:
            status = "champion"
        elif gain.timing is not None:
            status = "tied" if gain.timing.tied_with_champion else "timed"
        else:
            status = "estimated" if trial.finished else "stopped early"
        rows.append({
            "label": label(trial),
            "id": trial.id,
            "yaml": trial.configuration.to_yaml(),
            "colour": look.style(family(trial)).colour,
            "status": status,
            "speedup": gain.value,
            "interval": (gain.timing.low, gain.timing.high) if gain.timing else None,
            "tokens_per_second": gain.timing.tokens_per_second if gain.timing else None,
            "metrics": {name: trial.metrics.get(name, math.nan) for name in METRICS},
        })  # fmt: skip
    return rows
