"""PEARL against the chains of one process."""

from __future__ import annotations

import pandas as pd

from dashboards import cells
from dashboards.reports.sentences import sentences
from dashboards.sections import Report, ReportOrigin, Section, metric_name
from research.overlap.figures import timeline_figure
from research.overlap.study import ONE, PEARL, TWO, Overlap
from research.overlap.timeline import busy
from specdec_core.config import Configuration, distinct_labels

COLUMNS = {
    "where": cells.text("where"),
    "configuration": cells.text("configuration"),
    "tokens/s": cells.number("tokens_per_second", ".0f"),
    "over autoregressive": cells.ratio("speedup", "low", "high"),
    "MAT": cells.number("mat", ".2f"),
    "target ms": cells.number("target forward (ms)", ".2f"),
    "draft ms": cells.number("draft forwards (ms)", ".2f"),
    "other outputs": cells.text("differing"),
}
METRICS = ("tokens_per_second", "speedup", "mat")


def report(result: Overlap, origin: ReportOrigin) -> Report:
    """Everybody's speed, and what the draft and the target did when."""
    frame = result.frame()
    return Report(
        command="overlap",
        title=f"Drafting while the target verifies: {origin.pair}",
        origin=origin,
        findings=findings(result),
        parts=[_race(frame), _timeline(result), sentences(_named(result))],
        metrics={
            metric_name(row["where"], row["configuration"], key): row[key]
            for row in frame.to_dict("records")
            for key in METRICS
        },
    )


def findings(result: Overlap) -> list[str]:
    """PEARL against the fastest chains, and the most that hiding their drafting could gain."""
    pearl, one, two = (result.best(name) for name in (PEARL, ONE, TWO))
    lines = [
        f"{pearl.configuration.label} is {cells.of_ratio(pearl.over(chain))} the fastest chain of"
        f" {where}, {chain.configuration.label}"
        for chain, where in ((one, "one thread"), (two, "two threads"))
    ]
    rows = {(row["where"], row["config_id"]): row for row in result.frame().to_dict("records")}
    alone, overlapped = rows[ONE, one.configuration.id], rows[PEARL, pearl.configuration.id]
    t_t, drafting = alone["target forward (ms)"], alone["draft forwards (ms)"]
    drafting += alone["policy (ms)"]
    bound = (t_t + drafting) / max(t_t, drafting)
    forwards, waiting = overlapped["target forward (ms)"], overlapped["draft forwards (ms)"]
    rest = sum(overlapped[f"{part} (ms)"] for part in ("policy", "verification", "bookkeeping"))
    whole = forwards + waiting + rest
    return [
        *lines,
        f"in theory, were all of that chain's drafting hidden: {bound:.2f}× ({drafting:.2f} ms of"
        f" drafting and {t_t:.2f} ms of the target, one after the other or side by side)",
        f"a round of PEARL: target {forwards:.2f} ms, waiting for candidates {waiting:.2f} ms,"
        f" everything else, messages included, {rest:.2f} ms ({rest / whole:.0%});"
        f" {overlapped['mat']:.2f} tokens, the chain's {alone['mat']:.2f}",
    ]


def _race(frame: pd.DataFrame) -> Section:
    """The speed of every configuration; the fastest in each place is marked."""
    return Section(
        key="overlap",
        title="Drafting while the target verifies",
        note="Milliseconds of a mean round. Where the draft has a device of its own, its column is"
        " how long the target waits for candidates. Other outputs are those unlike autoregressive"
        " decoding's (near-ties of the data type).",
        frame=frame,
        shown=cells.table(frame, COLUMNS),
        marked=tuple(frame.groupby("where")["tokens_per_second"].idxmax()),
    )


def _named(result: Overlap) -> list[tuple[str, Configuration]]:
    configurations = [contestant.configuration for contestant in result.contestants]
    labels = distinct_labels(configurations)
    return [(labels[configuration.id], configuration) for configuration in configurations]


def _timeline(result: Overlap) -> Section:
    """How long the draft and the target were busy with what while decoding one prompt."""
    spans = result.spans
    seconds = max(s.end for s in spans) - min(s.start for s in spans)
    useful = busy([s for s in spans if not s.facts.get("useless")], "draft", "draft")
    parts = {
        "draft, drafting what may be of use": useful,
        "draft, drafting what was too late": busy(spans, "draft", "draft") - useful,
        "target, verifying": busy(spans, "target", "verify"),
        "target, waiting for candidates": busy(spans, "target", "wait"),
        "target, sending and receiving": busy(spans, "target", "talk"),
    }
    frame = pd.DataFrame({"who": list(parts), "seconds": list(parts.values())})
    frame["share"] = frame["seconds"] / seconds
    columns = {
        "who": cells.text("who"),
        "ms": cells.milliseconds("seconds"),
        "of the time": cells.number("share", ".0%"),
    }
    return Section(
        key="timeline",
        title="Who did what when",
        note=f"One prompt, {1e3 * seconds:.0f} ms. `trace.json` beside this file opens in Perfetto"
        " or chrome://tracing.",
        frame=frame,
        shown=cells.table(frame, columns),
        figure=timeline_figure(spans, "Draft and target side by side"),
    )
