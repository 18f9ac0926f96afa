"""Adaptive draft lengths against the best fixed one of the same drafter, and what limits them: a
policy saves drafting that is in vain, which is the smaller a part of the time the cheaper a draft
is beside its target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pandas as pd

from specdec_core.config import PolicyDrafterSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.evidence.bench.result import BenchResult, BenchRow, fastest, over
from specdec_core.evidence.bench.sets import by_set
from specdec_core.measure.comparison import OURS, Lead, lead_over, ratio_columns

FIXED = "fixed"
ALL = "all prompts"


@dataclass(frozen=True)
class SameDrafter:
    """Rows of ours that differ in nothing but their length policy."""

    fixed: list[BenchRow] = field(default_factory=list)
    adaptive: list[BenchRow] = field(default_factory=list)


def same_drafters(result: BenchResult, temperature: float) -> list[SameDrafter]:
    """All drafters with fixed and with adaptive lengths among their rows."""
    found: dict[str, SameDrafter] = {}
    for row in result.at(temperature, OURS):
        drafter = row.configuration.drafter if row.configuration is not None else None
        if not isinstance(drafter, PolicyDrafterSettings):
            continue
        same = found.setdefault(drafter.model_dump_json(exclude={"policy"}), SameDrafter())
        (same.fixed if isinstance(drafter.policy, FixedSettings) else same.adaptive).append(row)
    return [same for same in found.values() if same.fixed and same.adaptive]


def length_leads(result: BenchResult, temperature: float) -> Iterator[Lead]:
    """For each drafter its fastest adaptive length (`ours`) against its fastest fixed one."""
    for same in same_drafters(result, temperature):
        rows = {OURS: same.adaptive, FIXED: same.fixed}

        def best(
            which: str, prompts: slice, rows: dict[str, list[BenchRow]] = rows
        ) -> BenchRow | None:
            return fastest(rows[which], prompts)

        if (lead := lead_over(FIXED, len(result.ids), best, over)) is not None:
            yield lead


def lengths_frame(result: BenchResult, temperature: float) -> pd.DataFrame:
    """One row for each prompt set, all prompts first, and each row of a drafter that has adaptive
    lengths: the ratio to the fixed length that is fastest on that set, with its interval; how many
    candidates a forward of the target had and accepted; and the share of the time that went into
    drafting (forwards and policy)."""
    rows = [
        {"set": name, "temperature": temperature, **values}
        for name, part in {ALL: result, **by_set(result)}.items()
        for same in same_drafters(part, temperature)
        for values in _rows(same)
    ]
    return pd.DataFrame(rows)


def _rows(same: SameDrafter) -> Iterator[dict[str, object]]:
    baseline = fastest(same.fixed)
    if baseline is None:
        return
    for rows in (same.fixed, same.adaptive):
        for row in sorted(rows, key=lambda row: -row.tokens_per_second):
            yield {
                "contestant": row.name,
                "adaptive": rows is same.adaptive,
                "best_fixed": baseline.name,
                **ratio_columns("over_fixed", over(row, baseline)),
                **_drafting(row),
            }


def _drafting(row: BenchRow) -> dict[str, float]:
    takes = [take for repeat in row.takes for take in repeat]
    efforts = [take.effort for take in takes if take.effort is not None]
    rounds = max(sum(sum(effort.widths.values()) for effort in efforts), 1)
    seconds = sum(e.seconds["draft_forward"] + e.seconds["policy"] for e in efforts)
    return {
        "drafted": sum(effort.drafted for effort in efforts) / rounds,
        "accepted": sum(effort.accepted for effort in efforts) / rounds,
        "drafting": seconds / sum(sum(take.seconds) for take in takes),
    }
