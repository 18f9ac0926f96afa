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
            "K": str(each.length),
            "steps": f"{each.steps:,.0f}",
            "with candidates": f"{each.proposed / each.steps:.0%}",
            "ms a step": cells.as_number(each.seconds, ".2f", 1e3),
            "tokens a step": f"{each.tokens(each.length):.2f}",
            "accepted, by position": " ".join(f"{share:.2f}" for share in each.surviving),
        }
        for each in productions
    ]
    return Section(key="seen", title="What the server wrote", shown=cells.texts(rows))


def expected(lengths: Sequence[Expectation], now: Production) -> Section:
    """Other lengths beside the present one."""
    gains = _gains(lengths, now)
    present = next(each for each in lengths if each.length == now.length)
    rows = [
        {
            "K": f"{each.length}{' (beyond)' if each.beyond else ''}",
            "tokens a step": f"{each.tokens:.2f}",
            "ms a step": cells.as_number(each.seconds, ".2f", 1e3),
            "speed, now = 1": cells.as_number(gains.get(each.length), ".2f"),
            "longest step, × now": f"{each.tokens / present.tokens:.2f}",
        }
        for each in lengths
    ]
    return Section(
        key="expected",
        title="Expected",
        shown=cells.texts(rows),
        legend="a length is faster than now if its step takes less than the last column times a"
        " step now",
    )


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
