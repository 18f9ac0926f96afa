"""The configurations of a sweep, the fastest first."""

from __future__ import annotations

from typing import Any

import numpy as np

from dashboards import cells, look
from dashboards.ranking import family, place, speedup
from dashboards.reports.sentences import sentences, tooltip
from dashboards.sections import Section
from specdec_core.search.results import SweepResult, Trial

MOST_ROWS = 40
CONFIGURATION, SPEEDUP = "configuration", "speedup"
RATES = {
    "verific. rate": cells.number("verification_rate", ".3f"),
    "discard rate": cells.number("discard_rate", ".3f"),
    "MAT": cells.number("mat", ".2f"),
    "accept. rate": cells.number("acceptance_rate", ".2f"),
}
COLUMNS = {
    CONFIGURATION: cells.text("label"),
    SPEEDUP: cells.text("speedup"),
    "tokens/s": cells.number("tokens_per_second", ",.0f"),
    **RATES,
    "util.": cells.number("utilisation", ".2f"),
    "status": cells.text("status"),
}


def standings(result: SweepResult, most: int = MOST_ROWS, rest: str = "the report") -> Section:
    """At most `most` rows: the champion, the timed configurations, the best of each family and
    draft, then the next best. `rest` says where the other rows are."""
    timed = {t.config_id for t in (*result.timings, result.autoregressive) if t}
    ordered = sorted(result.trials, key=lambda trial: place(result, trial))
    first = [*(t for t in ordered if t.id in timed), *result.notable(most), *ordered]
    chosen = set([*dict.fromkeys(trial.id for trial in first)][:most])
    trials = [trial for trial in ordered if trial.id in chosen]
    return Section(
        key="configurations",
        title="All configurations",
        note="Speedup over autoregressive decoding, measured with its 95 % interval or estimated."
        " Verification rate: target forwards per output token. Discard rate: drafted tokens that"
        " are not in the output, per output token. MAT: output tokens per target forward."
        " Acceptance rate: accepted over drafted tokens. Utilisation: output tokens per draft"
        " forward.",
        shown=cells.table((_row(result, trial) for trial in trials), COLUMNS),
        legend=_legend(result, len(ordered) - len(trials), rest),
        marked=[n for n, trial in enumerate(trials) if trial.id == result.champion],
        ruled=[sum(trial.id in timed for trial in trials) - 1],
        swatches=[look.style(family(trial)).colour for trial in trials],
        tooltips=[tooltip(trial.configuration) for trial in trials],
        sortable=True,
        brief=(CONFIGURATION, SPEEDUP, *RATES),
    )


def timed_sentences(result: SweepResult) -> Section:
    """What the timed configurations do, in words, the champion first."""
    champion = [] if result.champion is None else [result.champion]
    ids = dict.fromkeys([*champion, *(timing.config_id for timing in result.timings)])
    named = [(result.labels[key], result.trial(key).configuration) for key in ids]
    return sentences(named, "What the fastest do")


def _row(result: SweepResult, trial: Trial) -> dict[str, Any]:
    gain = speedup(result, trial)
    rates = trial.metrics | ({} if trial.counts["n_drafted"] else {"acceptance_rate": np.nan})
    text = cells.as_ratio(gain.value, *((gain.timing.low, gain.timing.high) if gain.timing else ()))
    if gain.timing is None:
        text = f"≈ {text}" if text != cells.NONE else text
    elif gain.timing.tied_with_champion:
        text = f"={text}"
    return rates | {
        "label": result.labels[trial.id]
        + (" ★" if trial.id == result.champion else "")
        + ("" if trial.finished else " ‡"),
        "speedup": text,
        "tokens_per_second": gain.timing.tokens_per_second if gain.timing else None,
        "status": _status(result, trial),
    }


def _status(result: SweepResult, trial: Trial) -> str:
    timing = speedup(result, trial).timing
    if result.champion is not None and trial.id == result.served.id:
        return "champion"
    if trial.id == result.champion:
        return "fastest alone"
    if timing is not None:
        return "tied" if timing.tied_with_champion else "timed"
    if not trial.finished:
        return "stopped early"
    return "replayed" if trial.replayed else "estimated"


def _legend(result: SweepResult, left_out: int, rest: str) -> str:
    notes = ["★ champion", "= tied with it", "≈ estimated"]
    if result.under_load is not None:
        notes[:2] = ["★ fastest with one request at a time", "= tied with it"]
    if result.hardware is not None:
        notes = ["★ best estimate", f"≈ estimated for {result.hardware}, not timed"]
    if not all(trial.finished for trial in result.trials):
        notes.append("‡ stopped early")
    if left_out:
        notes.append(f"{left_out} more in {rest}")
    return ", ".join(notes)
