"""What lossy drafting changes: how far its texts drift from the target's."""

from __future__ import annotations

import pandas as pd

from dashboards import cells
from dashboards.sections import Report, ReportOrigin, Section

TEXTS = {
    "draft": cells.text("draft"),
    "width": lambda row: str(row["width"] or cells.NONE),
    "keeps it": lambda row: "yes" if row["lossless"] else "lossy",
    "nats a token": cells.number("log_likelihood", ".3f"),
    "against the target's own": cells.interval("change", "+.3f"),
    "the target's first choice": cells.interval("agreement", ".1%"),
    "MAT": cells.number("mat", ".2f"),
}
METRICS = ("log_likelihood", "change", "agreement", "mat")


def report(texts: pd.DataFrame, origin: ReportOrigin) -> Report:
    """`texts` has one row for each draft and width (:func:`research.drift.by_width.on_texts`)."""
    section = Section(
        key="drift",
        title="Log-likelihood of the output under the target",
        note="Nats a token, and how much more than what the target itself writes, with a 95 %"
        " interval over prompts; and the share of tokens that it would have chosen greedily.",
        frame=texts,
        shown=cells.table(texts, TEXTS),
    )
    return Report(
        command="drift",
        title="Drift of target-initialised trees",
        origin=origin,
        parts=[section],
        run_name="drift",
        metrics=_metrics(texts),
        tags={"lossless": "false"},
    )


def _metrics(frame: pd.DataFrame) -> dict[str, float]:
    metrics = {}
    for row in frame.to_dict("records"):
        place = f"{row['draft']}.width_{row['width']}" if row["width"] else row["draft"]
        for name in METRICS:
            if not cells.unknown(row[name]):
                metrics[f"text.{place}.{name}"] = row[name]
    return metrics
