"""One self-contained HTML report of a sweep: no network, one file to send around."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from plotly.offline import get_plotlyjs

from dashboards import look
from dashboards.drawings import draw, embed, log_figures, template
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
from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.search.results import SweepResult, Timing, Trial
from specdec_core.tokens.statistics import Ratio, paired_ratio

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from dashboards.evidence import Evidence

TABLE_ROWS = 300


def write_report(result: SweepResult, folder: Path, traces: Path | None = None) -> Path:
    """Write `<folder>/report.html` from the result and the folder's rounds.parquet; returns its
    path. With `traces`, a recording of the sweep's prompts, the report has a section on what it
    says; unset, it is the recording that the sweep replayed, if that is still there. Raises
    UserError where the rounds are missing, or the recording is missing or broken."""
    return write_atomically(
        Path(folder) / "report.html", render(result, *_read(result, folder, traces))
    )


def log_report_figures(
    client: MlflowClient,
    run_id: str,
    result: SweepResult,
    folder: Path,
    traces: Path | None = None,
) -> None:
    """Log every figure of the report to an MLflow run (:func:`dashboards.drawings.log_figures`).
    Takes and raises what :func:`write_report` does."""
    for drawings in draw(result, *_read(result, folder, traces)).values():
        log_figures(client, run_id, drawings)


def _read(
    result: SweepResult, folder: Path, traces: Path | None
) -> tuple[pd.DataFrame, Evidence | None]:
    source = Path(folder) / "rounds.parquet"
    if not source.is_file():
        raise UserError(f"{source}: no such file; a finished sweep leaves its rounds there")
    timed = [t.config_id for t in (result.autoregressive, *result.timings) if t is not None]
    shown = list(dict.fromkeys([*(trial.id for trial in contenders(result)), *timed]))
    rounds = pd.read_parquet(source, filters=[("config_id", "in", shown)] if shown else None)
    if traces is None and result.replay is not None and Path(result.replay.recording).is_dir():
        traces = Path(result.replay.recording)
    if traces is None:
        return rounds, None
    from dashboards.evidence import gather  # torch takes seconds to import

    return rounds, gather(result, traces)


def render(result: SweepResult, rounds: pd.DataFrame, evidence: Evidence | None = None) -> str:
    """The report as HTML. `rounds` has the columns config_id, request_id, round and those of
    :class:`specdec_core.tokens.statistics.Round`."""
    return template("report.jinja").render(
        result=result,
        headline=headline(result),
        summary=summary(result),
        said=best.configuration.sentence if (best := champion(result)) else None,
        tiles=list(tiles(result)),
        facts=list(facts(result)),
        caveats=list(caveats(result)),
        rows=table(result, TABLE_ROWS),
        rows_left_out=max(0, len(ranked(result)) - TABLE_ROWS),
        metrics=METRICS,
        sections=[
            (heading, [embed(name, drawing) for name, drawing in drawings.items()])
            for heading, drawings in draw(result, rounds, evidence).items()
            if drawings
        ],
        neutral=[look.INK, look.MUTED, look.PAPER],
        plotly=get_plotlyjs(),
    )


# ----------------------------------------------------------------------------------- what is said


def headline(result: SweepResult) -> str:
    if result.champion is None:
        return "No champion yet: nothing was timed"
    best = champion(result)
    if best is None:
        return "Nothing beats autoregressive decoding here"
    gain, name = speedup(result, best), label(result, best)
    if gain.timing is None:
        where = f" on {result.hardware}" if result.hardware else ""
        return f"{name} is an estimated {gain.value:.2f}× as fast as autoregressive decoding{where}"
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
        f"forward times of {result.hardware}, from a file"
        if result.hardware
        else f"{profile.target_dtype} on {machine}, {threads(result)}",
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
        note = label(result, fixed)
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
    if result.hardware:
        yield "forward times", f"of {result.hardware}, from a file; nothing was timed here"
    else:
        yield "device", f"{profile.device}, {threads(result)}"
    if result.replay is not None:
        replay = result.replay
        yield (
            "replay",
            f"{replay.configurations:,} configurations counted from {replay.recording}, "
            f"{replay.per_second:,.0f} a second, instead of {replay.forwards_saved:,} forwards",
        )
    yield "lossless", lossless(result)
    yield from environment.items()


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
    labels = {t.id: label(result, t) for t in trials}
    if result.champion is not None:
        tied = [labels[t.config_id] for t in timings if t.tied_with_champion]
        if tied:
            yield f"Tied with the champion on these prompts: {', '.join(tied)}."
    lossy = [labels[t.id] for t in trials if not t.configuration.lossless]
    if lossy:
        yield (
            f"{len(lossy)} of {len(trials)} configurations are lossy: they do not keep the "
            "target's distribution, and none is the best unless it was allowed by name; "
            "`specdec drift` measures by how much."
        )
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
    replay = result.replay
    if replay is not None and replay.equal < replay.checked:
        yield (
            f"Of {replay.checked} finalists that were decoded to be timed, "
            f"{replay.checked - replay.equal} had other counts than the replay, their forwards "
            f"within {replay.deviation:.1%}: near-ties between tokens flip, as a token is verified "
            "in other company."
        )
    if result.hardware:
        yield (
            f"Ranked for {result.hardware} by its forward times: all speedups are estimates, in "
            "which a forward takes the same time whatever its width."
        )
    elif len(timings) < len(trials):
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
        elif not trial.finished:
            status = "stopped early"
        else:
            status = "replayed" if trial.replayed else "estimated"
        rows.append({
            "label": label(result, trial),
            "id": trial.id,
            "said": f"{trial.configuration.sentence}\n\n{trial.configuration.to_yaml()}",
            "colour": look.style(family(trial)).colour,
            "status": status,
            "speedup": gain.value,
            "interval": (gain.timing.low, gain.timing.high) if gain.timing else None,
            "tokens_per_second": gain.timing.tokens_per_second if gain.timing else None,
            "metrics": {name: trial.metrics.get(name, math.nan) for name in METRICS},
        })  # fmt: skip
    return rows
