"""What lossy drafting changes: how far its texts drift from the target's."""

from __future__ import annotations

import pandas as pd

from dashboards import cells
from dashboards.sections import Report, ReportOrigin, Section

PLACE = {
    "draft": cells.text("draft"),
    "width": lambda row: str(row["width"] or cells.NONE),
    "keeps it": lambda row: "yes" if row["lossless"] else "lossy",
}
TOY = {
    **PLACE,
    "KL, nats": cells.number("kl", "z.4f"),
    "total variation": cells.number("total_variation", "z.4f"),
    "KL by samples": cells.interval("sampled_kl", ".3f"),
    "p of none": cells.number("p_value", ".1g"),
}
TEXTS = {
    **PLACE,
    "nats a token": cells.number("log_likelihood", ".3f"),
    "against the target's own": cells.interval("change", "+.3f"),
    "the target's first choice": cells.interval("agreement", ".1%"),
    "MAT": cells.number("mat", ".2f"),
}
METRICS = {
    "toy": ("kl", "total_variation", "sampled_kl", "p_value"),
    "text": ("log_likelihood", "change", "agreement", "mat"),
}


def report(toy: pd.DataFrame, texts: pd.DataFrame, origin: ReportOrigin) -> Report:
    """`toy` has one row for each draft of the toy pair and width
    (:func:`research.drift.by_width.on_toy_pair`), if it was measured; `texts` one for each draft
    and width (:func:`research.drift.by_width.on_texts`)."""
    of_toy = Section(
        key="toy",
        title="Distance from the target's distribution, toy pair",
        note="Over whole texts, exactly and as the engine's samples tell it with their 95 %"
        " interval; and the chance to see such samples if nothing drifted.",
        shown=cells.table(toy, TOY) if len(toy) else None,
    )
    of_texts = Section(
        key="texts",
        title="Log-likelihood of the output under the target",
        note="Nats a token, and how much more than what the target itself writes, with a 95 %"
        " interval over prompts; and the share of tokens that it would have chosen greedily.",
        shown=cells.table(texts, TEXTS),
    )
    return Report(
        command="drift",
        title="Drift of target-initialised trees",
        origin=origin,
        parts=[*([of_toy] if len(toy) else []), of_texts],
        frames={"drift": pd.concat([toy.assign(part="toy"), texts.assign(part="texts")])},
        run_name="drift",
        metrics={**_metrics("toy", toy), **_metrics("text", texts)},
        tags={"lossless": "false"},
    )


def _metrics(part: str, frame: pd.DataFrame) -> dict[str, float]:
    metrics = {}
    for row in frame.to_dict("records"):
        place = f"{row['draft']}.width_{row['width']}" if row["width"] else row["draft"]
        for name in METRICS[part]:
            if not cells.unknown(row[name]):
                metrics[f"{part}.{place}.{name}"] = row[name]
    return metrics
