"""Tables for the console."""

from __future__ import annotations

from rich import box
from rich.table import Table

from specdec_core.search.results import SweepResult, Timing, Trial

MOST_ROWS = 40


def sweep_table(result: SweepResult, most: int = MOST_ROWS) -> Table:
    """Every configuration of a sweep, the timed ones first, with at most `most` rows. A speedup
    without an interval is estimated from counts and the profile, and marked with ~."""
    timings = {t.config_id: t for t in (*result.timings, result.autoregressive) if t}

    def order(trial: Trial) -> tuple[bool, float]:
        timing = timings.get(trial.id)
        speedup = timing.speedup if timing else trial.metrics["estimated_speedup"]
        return timing is None, -speedup

    # Where there are too many, the best of each family and draft before the next best of any.
    first = [t for t in result.trials if t.id in timings] + result.notable(most)
    shown = [*{t.id: t for t in (*first, *sorted(result.trials, key=order))}.values()][:most]
    ranked = sorted(shown, key=order)
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("configuration")
    for heading in (
        "speedup over\nautoregressive",
        "verific.\nrate",
        "discard\nrate",
        "\nMAT",
        "accept.\nrate",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for trial in ranked:
        timing = timings.get(trial.id)
        rates = trial.metrics
        drafted = trial.counts["n_drafted"] > 0
        table.add_row(
            result.labels[trial.id]
            + (" ★" if trial.id == result.champion else "")
            + ("" if trial.finished else " †"),
            _speedup(trial, timing),
            f"{rates['verification_rate']:.3f}",
            f"{rates['discard_rate']:.3f}",
            f"{rates['mat']:.2f}",
            f"{rates['acceptance_rate']:.2f}" if drafted else "–",
            style="bold" if trial.id == result.champion else None,
            end_section=timing is not None and trial is ranked[len(timings) - 1],
        )
    notes = ["★ champion", "= tied with it", "~ estimated, without prefill", "† stopped early"]
    if result.hardware is not None:
        notes = ["★ best estimate", f"~ estimated for {result.hardware}, not timed"]
    if len(result.trials) > len(shown):
        notes.append(f"{len(result.trials) - len(shown)} more in the report")
    table.caption = ", ".join(notes)
    return table


def sentences(result: SweepResult) -> list[tuple[str, str]]:
    """What those that were timed do: label and sentence, the champion first."""
    timed = dict.fromkeys(t.config_id for t in result.timings)
    shown = {result.champion: None, **timed} if result.champion else timed
    return [(result.labels[key], result.trial(key).configuration.sentence) for key in shown]


def _speedup(trial: Trial, timing: Timing | None) -> str:
    if timing is None:
        return f"~{trial.metrics['estimated_speedup']:.2f}×"
    if timing.low == timing.high:
        return f"{timing.speedup:.2f}×"
    tied = "=" if timing.tied_with_champion else ""
    return f"{tied}{timing.speedup:.2f}× ({timing.low:.2f}–{timing.high:.2f})"
