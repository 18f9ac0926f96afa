"""PEARL against the chains of one process: sections of a report."""

from __future__ import annotations

import pandas as pd

from dashboards.figures.timeline import timeline_figure
from dashboards.sections import Section
from specdec_core.drafting.pearl.timeline import busy
from specdec_core.studies.overlap import ONE, PEARL, TWO, Overlap


def race_section(result: Overlap) -> Section:
    """Everybody, and the fastest of each place marked."""
    frame = result.frame()
    shown = [
        {
            "where": row["where"],
            "configuration": row["configuration"],
            "tokens/s": f"{row['tokens_per_second']:.0f}",
            "over autoregressive": f"{row['speedup']:.2f} ({row['low']:.2f}–{row['high']:.2f})",
            "MAT": f"{row['mat']:.2f}",
            "target ms": f"{row['target forward (ms)']:.2f}",
            "draft ms": f"{row['draft forwards (ms)']:.2f}",
            "other outputs": str(row["differing"]),
        }
        for row in frame.to_dict("records")
    ]
    return Section(
        key="overlap",
        title="Drafting beside the target",
        note="Milliseconds of a mean round; where the draft works beside the target, its column is"
        " what the target waits for candidates. Other outputs are those unlike autoregressive"
        " decoding's (near-ties of the data type).",
        frame=frame,
        shown=pd.DataFrame(shown),
        marked=tuple(frame.groupby("where")["tokens_per_second"].idxmax()),
    )


def timeline_section(result: Overlap) -> Section:
    """Who was busy for how much of one prompt."""
    spans = result.spans
    seconds = max(s.end for s in spans) - min(s.start for s in spans)
    kept = [s for s in spans if not s.facts.get("useless")]
    parts = {
        "draft, drafting what may be of use": busy(kept, "draft", "draft"),
        "draft, drafting what was too late": busy(spans, "draft", "draft")
        - busy(kept, "draft", "draft"),
        "target, verifying": busy(spans, "target", "verify"),
        "target, waiting for candidates": busy(spans, "target", "wait"),
        "target, sending and receiving": busy(spans, "target", "talk"),
    }
    frame = pd.DataFrame({"who": list(parts), "seconds": list(parts.values())})
    frame["share"] = frame["seconds"] / seconds
    shown = pd.DataFrame(
        {
            "who": frame["who"],
            "ms": [f"{1e3 * s:.1f}" for s in frame["seconds"]],
            "of the time": [f"{s:.0%}" for s in frame["share"]],
        }
    )
    return Section(
        key="timeline",
        title="Who did what when",
        note=f"One prompt, {1e3 * seconds:.0f} ms. `trace.json` beside this file opens in Perfetto"
        " or chrome://tracing.",
        frame=frame,
        shown=shown,
        figure=timeline_figure(spans, "Draft and target side by side"),
    )


def findings(result: Overlap) -> list[str]:
    """PEARL against the fastest chains, and what could have been gained."""
    pearl, one, two = (result.best(name) for name in (PEARL, ONE, TWO))
    lines = []
    for chain, where in ((one, "one thread"), (two, "two threads")):
        ratio = pearl.over(chain)
        lines.append(
            f"{pearl.configuration.label} is {ratio.value:.2f}× ({ratio.low:.2f}–{ratio.high:.2f})"
            f" the fastest chain of {where}, {chain.configuration.label}"
        )
    frame = result.frame().set_index(["where", "config_id"])
    alone = frame.loc[(ONE, one.configuration.id)]
    beside = frame.loc[(PEARL, pearl.configuration.id)]
    t_t, drafting = alone["target forward (ms)"], alone["draft forwards (ms)"]
    policy = alone["policy (ms)"]
    drafting += policy
    bound = (t_t + drafting) / max(t_t, drafting)
    forwards = beside["target forward (ms)"]
    parts = ("draft forwards", "policy", "verification", "bookkeeping", "target forward")
    whole = sum(beside[f"{part} (ms)"] for part in parts)
    rest = whole - forwards - beside["draft forwards (ms)"]
    lines += [
        f"in theory, were all of that chain's drafting hidden: {bound:.2f}× ({drafting:.2f} ms of"
        f" drafting and {t_t:.2f} ms of the target, one after the other or side by side)",
        f"a round of PEARL: target {forwards:.2f} ms, waiting for candidates"
        f" {beside['draft forwards (ms)']:.2f} ms, everything else, messages included,"
        f" {rest:.2f} ms ({rest / whole:.0%}); {beside['mat']:.2f} tokens, the chain's"
        f" {alone['mat']:.2f}",
    ]
    return lines
