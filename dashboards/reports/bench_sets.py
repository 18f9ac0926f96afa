"""A benchmark by prompt set."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from dashboards import cells
from dashboards.reports.contestants import by_group
from dashboards.sections import Section
from specdec_core.evidence.bench.result import BenchResult, summary_frame
from specdec_core.evidence.bench.sets import by_set, sets_frame
from specdec_core.measure.comparison import OURS

NAME = ("", "contestant")
OVER = "over our autoregressive"


def sets(result: BenchResult, temperature: float) -> Iterator[Section]:
    """Everybody's speed on each of several prompt sets."""
    whole = sets_frame(result)
    if not len(whole):
        return
    frame = whole[whole["temperature"] == temperature]
    overall = summary_frame(result)
    everybody = by_group(result, overall[overall["temperature"] == temperature])
    order = [*zip(everybody["group"], everybody["contestant"], strict=True)]
    shown: dict[tuple[str, str], list[str]] = {NAME: [name for _, name in order]}
    best: list[tuple[int, int]] = []
    for name, part in by_set(result).items():
        of_set = frame[frame["set"] == name].set_index(["group", "contestant"])
        rows = [of_set.loc[key] for key in order]
        fastest = part.best(temperature, OURS)
        if fastest is not None:
            best.append((order.index((OURS, fastest.name)), len(shown) + 1))
        heading = f"{name} ({len(part.ids)})"
        over = cells.ratio(*(f"over_autoregressive{end}" for end in ("", "_low", "_high")))
        shown |= {
            (heading, "tokens/s"): [cells.as_number(r["tokens_per_second"], ".0f") for r in rows],
            (heading, OVER): [over(row) for row in rows],
            (heading, "MAT"): [cells.as_number(r["mean_accepted"], ".2f") for r in rows],
        }
    yield Section(
        key=f"sets_{temperature:g}",
        title=f"By prompt set, temperature {temperature:g}",
        note="As above, on each set's prompts alone, whose number is in brackets, in the order of"
        " all prompts; stressed, our fastest on the set.",
        frame=frame,
        shown=pd.DataFrame(shown, dtype=object),
        best=best,
        brief=[heading for heading in shown if heading == NAME or heading[1] == OVER],
        intervals=False,
    )
