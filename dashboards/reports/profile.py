"""What forwards of a pair cost."""

from __future__ import annotations

import math

from dashboards import cells
from dashboards.sections import Section
from specdec_core.cost import ForwardCost, Profile


def sections(profile: Profile) -> list[Section]:
    """Forward times by their width at a typical context, what was fitted to them, and what the
    engine adds."""
    costs = {"target": profile.target, **profile.drafts}
    measured = profile.target.measurements
    typical = profile.target.typical_context
    context = min({m.context for m in measured}, key=lambda c: abs(c - typical))
    batch = min(m.batch for m in measured)
    times: dict[int, dict[str, float]] = {}
    for name, cost in costs.items():
        for m in cost.measurements:
            if (m.context, m.batch) == (context, batch):
                row = times.setdefault(m.width, {"n": m.width, **dict.fromkeys(costs, math.nan)})
                row[name] = m.seconds
    return [
        Section(
            key="times",
            title=f"ms a forward of n tokens, context {context}, batch {batch}, {profile.device}",
            shown=cells.table(
                times.values(),
                {"n": cells.text("n"), **{name: cells.milliseconds(name) for name in costs}},
            ),
        ),
        Section(
            key="fit",
            title="Fit of the forward times",
            shown=cells.texts(_fit(profile, n, c, context, batch) for n, c in costs.items()),
        ),
        Section(key="overheads", lines=[_overheads(profile)]),
    ]


def _fit(
    profile: Profile, name: str, cost: ForwardCost, context: int, batch: int
) -> dict[str, str]:
    one = cost.seconds(1, context, batch)
    more = cost.seconds(3, context, batch) - cost.seconds(2, context, batch)
    return {
        "model": name,
        "type": profile.target_dtype if cost is profile.target else profile.draft_dtype,
        "n = 1, ms": f"{1e3 * one:.2f}",
        "÷ target": f"{one / profile.target.seconds(1, context, batch):.3f}",
        "+1 token, µs": f"{1e6 * more:.0f}",
        "R²": cells.as_number(cost.r2, ".3f"),
        "worst error": cells.as_number(cost.worst_error, ".0%"),
    }


def _overheads(profile: Profile) -> str:
    parts = [f"a round {1e3 * profile.round_overhead:.2f} ms"]
    if profile.row_overhead:
        parts.append(f"each further request in a step {1e3 * profile.row_overhead:.2f} ms")
    parts += [
        f"a token of {name} {1e3 * seconds:.2f} ms"
        for name, seconds in profile.draft_overhead.items()
    ]
    parts += [
        f"a round of {name} {1e3 * seconds:.2f} ms" for name, seconds in profile.proposals.items()
    ]
    return f"the engine adds: {', '.join(parts)}"
