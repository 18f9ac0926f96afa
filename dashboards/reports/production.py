"""What a production server told of its speculation, and what other lengths are expected to give."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards import cells
from dashboards.sections import Section
from specdec_core.servers.acceptance import Expectation, Production

UNKNOWN = (
    "Not told: the texts, so nothing that drafts otherwise (another draft, lookups, policies) can"
    " be replayed; how acceptance and time change with the load; what a step takes without its"
    " draft."
)


def seen(productions: Sequence[Production]) -> Section:
    """Each server: its steps, and the share of them that accepted at each position."""
    rows = [
        {
            "K": each.length,
            "steps": each.steps,
            "with candidates": each.proposed / each.steps,
            "ms a step": each.seconds,
            "tokens": each.tokens(each.length),
            "by position": " ".join(f"{share:.2f}" for share in each.surviving),
        }
        for each in productions
    ]
    columns = {
        "K": cells.text("K"),
        "steps": cells.count("steps"),
        "with candidates": cells.number("with candidates", ".0%"),
        "ms a step": cells.milliseconds("ms a step"),
        "tokens a step": cells.number("tokens", ".2f"),
        "accepted, by position": cells.text("by position"),
    }
    return Section(key="seen", title="What the server wrote", shown=cells.table(rows, columns))


def expected(lengths: Sequence[Expectation], now: Production) -> Section:
    """Other lengths beside the present one; a step may take up to the last column times as long as
    now before a length is slower than the present."""
    gains = _gains(lengths, now)
    present = next(each for each in lengths if each.length == now.length)
    rows = [
        {
            "K": f"{each.length}{' (beyond)' if each.beyond else ''}",
            "tokens": each.tokens,
            "seconds": each.seconds,
            "speed": gains.get(each.length),
            "even": each.tokens / present.tokens,
        }
        for each in lengths
    ]
    columns = {
        "K": cells.text("K"),
        "tokens a step": cells.number("tokens", ".2f"),
        "ms a step": cells.milliseconds("seconds"),
        "speed, now = 1": cells.number("speed", ".2f"),
        "pays below, × a step now": cells.number("even", ".2f"),
    }
    return Section(key="expected", title="Expected", shown=cells.table(rows, columns))


def _gains(lengths: Sequence[Expectation], now: Production) -> dict[int, float]:
    """How many times as fast as the present length each is whose time is known. All are estimates
    by the same acceptance, which need not be that of the server `now`."""
    speeds = {each.length: each.speed for each in lengths if each.speed is not None}
    return {length: speed / speeds[now.length] for length, speed in speeds.items()}


def findings(lengths: Sequence[Expectation], now: Production) -> list[str]:
    """What follows, and what cannot be known."""
    gains = _gains(lengths, now)
    known = [each.length for each in lengths if each.length in gains and not each.beyond]
    lines = []
    if set(known) - {now.length}:
        best = max(known, key=gains.__getitem__)
        lines.append(
            f"fastest by this estimate: K = {best}, {cells.as_ratio(gains[best])} the speed of"
            f" K = {now.length}"
        )
    else:
        lines.append(
            "how a step's time changes with K is not told: give the file of a server with another"
            " K, too, or --profile with vLLM's own times (`specdec profile --engine vllm`)"
        )
    if now.varied and now.reached:
        lines.append(
            f"a step with candidates had {now.candidates / now.proposed:.1f} of them, not always"
            f" {now.length}: each position counts by the steps that had a candidate there"
        )
    elif now.varied:
        lines.append(
            f"a step with candidates had {now.candidates / now.proposed:.1f} of them, not always"
            f" {now.length}: the server's length varied, or its drafter found fewer. The tokens of"
            " lengths above the least one are lower bounds then"
        )
    return [*lines, UNKNOWN]
