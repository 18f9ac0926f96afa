"""A server's settings as they were ranked by replay, and as they were timed in it."""

from __future__ import annotations

import pandas as pd

from dashboards import cells
from dashboards.reports.ranking import SETTING
from dashboards.sections import Report, ReportOrigin, Section
from research.scan.study import ScanResult

TIMED = {
    **SETTING,
    "measured": cells.ratio("speedup", "low", "high"),
    "tokens/s": cells.number("tokens_per_second", ".0f"),
    "tokens a step, by replay": cells.number("expected_mat", ".2f"),
    "tokens a step": cells.number("mat", ".2f"),
}


def report(result: ScanResult) -> Report:
    """Expected and measured speed, and what the ranking's choice costs."""
    best = result.scanned.index(result.best)
    against = result.over(result.first, result.best)
    frame = _frame(result)
    return Report(
        command="lab scan",
        title=f"{result.server} with {result.pair.name}: settings ranked and timed",
        origin=ReportOrigin(
            name=result.name,
            pair=result.pair.name,
            started=result.started,
            notes=[
                f"{result.prompts.count} prompts of {result.prompts.source}, the recorded ones,"
                f" {result.max_new_tokens} new tokens, {result.repeats} repeats, all settings"
                " interleaved, greedy",
                f"expected: counts of {result.recording}, forward times of {result.times}",
                result.first.row.version,
            ],
            params={
                "server": result.server,
                "max_new_tokens": result.max_new_tokens,
                "repeats": result.repeats,
                "prompts": result.prompts.source,
            },
            facts=result.environment,
        ),
        findings=[
            f"first by replay: {result.labels[0]}; fastest of {len(result.scanned)} in"
            f" {result.server}: {result.labels[best]}",
            f"regret of the first choice {100 * result.regret:.1f} % ({cells.of_ratio(against)} the"
            f" fastest), Spearman {result.spearman:.3f}",
        ],
        parts=[
            Section(
                key="settings",
                title="Settings by their expected speed",
                note="Speed over the server's own autoregressive decoding; measured with 95 %"
                " bootstrap intervals over prompts and repeats, prefill included.",
                frame=frame,
                shown=cells.table(frame, TIMED),
                marked=(best,),
            )
        ],
        metrics={
            "spearman": result.spearman,
            "regret": result.regret,
            "speedup_of_choice": frame["speedup"][0],
            "speedup_of_fastest": frame["speedup"][best],
        },
    )


def _frame(result: ScanResult) -> pd.DataFrame:
    rows = []
    for label, each in zip(result.labels, result.scanned, strict=True):
        ratio = result.over(each, result.plain)
        rows.append(
            {
                "setting": label,
                "expected": each.expected,
                "speedup": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "tokens_per_second": each.row.tokens_per_second,
                "expected_mat": each.expected_tokens,
                "mat": each.row.mean_accepted(),
            }
        )
    return pd.DataFrame(rows)
