"""What the checks for a certificate have found."""

from __future__ import annotations

from dashboards import cells
from dashboards.sections import Section
from specdec_core.evidence.certificate.certificate import Checks, LiveSpeed


def checked(checks: Checks) -> Section:
    """A row for each finding, and whether it is as it must be."""
    rows = [_greedy(checks), *_sampled(checks)]
    if checks.speed is not None:
        rows.append(_speed(checks.speed))
    failures = [number for number, row in enumerate(rows) if row["verdict"] != "ok"]
    return Section(
        key="certificate",
        shown=cells.texts(rows),
        marked=failures,
        legend=f"shifts: how much more often than by the target's probabilities; all of them"
        f" together are false alarms with probability {checks.sampled.level:g}",
    )


def _greedy(checks: Checks) -> dict[str, str]:
    greedy = checks.greedy
    return {
        "check": "greedy texts are the target's",
        "on": f"{greedy.prompts} prompts, {greedy.tokens:,} tokens, {greedy.dtype}",
        "found": f"{greedy.differing} differ"
        + (f", {greedy.ties} at near ties" if greedy.ties else ""),
        "verdict": _verdict(greedy.passed),
    }


def _sampled(checks: Checks) -> list[dict[str, str]]:
    sampled = checks.sampled
    on = f"{sampled.texts} texts, {sampled.tokens:,} tokens, {checks.greedy.dtype}"
    rows = [
        {
            "check": f"sampled: {favour.kind}",
            "on": on,
            "found": f"shift {100 * favour.shift:+.2f} ± {196 * favour.error:.2f} points"
            f" (99 % find {100 * favour.detectable:.1f})",
            "verdict": _verdict(not sampled.shifted(favour)),
        }
        for favour in sampled.favours
    ]
    impossible = {
        "check": "sampled: tokens of probability 0",
        "on": on,
        "found": str(sampled.impossible),
        "verdict": _verdict(not sampled.impossible),
    }
    return [*rows, impossible]


def _speed(speed: LiveSpeed) -> dict[str, str]:
    return {
        "check": "speed, over autoregressive",
        "on": f"{speed.prompts} prompts × {speed.repeats}, {speed.target_dtype}",
        "found": f"{speed.ratio:.2f}× ({speed.low:.2f}–{speed.high:.2f})",
        "verdict": _verdict(speed.passed),
    }


def _verdict(passed: bool) -> str:
    return "ok" if passed else "FAILED"
