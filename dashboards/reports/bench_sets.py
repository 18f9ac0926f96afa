"""A benchmark by prompt set, and what adaptive draft lengths bring there."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from dashboards import cells
from dashboards.reports.contestants import by_group, chosen_on
from dashboards.sections import Section
from specdec_core.evidence.bench.lengths import ALL, length_leads, lengths_frame
from specdec_core.evidence.bench.limits import of_oracle
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


def lengths(result: BenchResult, temperature: float) -> Iterator[Section]:
    """Adaptive draft lengths over the best fixed one of the same drafter."""
    frame = lengths_frame(result, temperature)
    if not len(frame):
        return
    whole = frame[frame["set"] == ALL]
    over = cells.ratio("over_fixed", "over_fixed_low", "over_fixed_high")
    columns = {
        "": cells.text("contestant"),
        "candidates": cells.number("drafted", ".2f"),
        "accepted": cells.number("accepted", ".2f"),
        "drafting": cells.number("drafting", ".0%"),
        "over the best fixed": over,
    }
    shown = cells.table(whole, columns)
    for name in frame["set"].unique()[1:]:
        of_set = {row["contestant"]: row for row in frame[frame["set"] == name].to_dict("records")}
        shown[name] = [over(of_set[contestant]) for contestant in whole["contestant"]]
    yield Section(
        key=f"lengths_{temperature:g}",
        title=f"Draft lengths, temperature {temperature:g}",
        note="Each drafter's fixed lengths, the fastest stressed, then its adaptive ones:"
        " candidates a forward of the target, how many of them were accepted, the share of the time"
        " that is drafting (of which a policy can save what candidates in vain take), and the speed"
        " over the fixed length that is fastest on the same prompts, which favours that one, with"
        " 95 % bootstrap intervals of the pairs.",
        frame=frame,
        shown=shown,
        marked=[n for n, best in enumerate(whole["contestant"] == whole["best_fixed"]) if best],
        on_console=False,
    )


def length_findings(result: BenchResult, temperature: float) -> Iterator[str]:
    """Each drafter's best adaptive length against its best fixed one, in sentences."""
    rows = {row.name: row for row in result.at(temperature, OURS)}
    for lead in length_leads(result, temperature):
        chosen = chosen_on(lead, "prompts", f"{len(result.ids) - lead.prompts} prompts")
        line = (
            f"temperature {temperature:g}: {lead.ours} is"
            f" {cells.as_ratio(lead.ratio, lead.low, lead.high)} the best fixed length,"
            f" {lead.theirs} ({chosen})"
        )
        fixed = rows[lead.theirs]
        assert fixed.configuration is not None
        draft = fixed.configuration.draft_of(result.pair.drafts)
        if (oracle := of_oracle(result, fixed, draft)) is not None:
            line += f"; a chain that always stops in time would be {1 / oracle:.2f}× that"
        yield line
