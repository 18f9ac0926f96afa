"""What a recording holds."""

from __future__ import annotations

from dashboards import cells
from dashboards.sections import Section
from specdec_core.recordings.schema import Recording


def drafts(recording: Recording) -> Section:
    """How each draft follows the target along the recorded texts."""
    sampling = recording.header.sampling
    return Section(
        key="drafts",
        shown=cells.texts(_draft(recording, draft) for draft in recording.header.pair.drafts),
        legend="agreement: positions at which draft and target have the same likeliest token"
        if sampling.greedy
        else "coupled sampling accepts by agreement, rejection sampling with Σ min(p, q)",
    )


def _draft(recording: Recording, draft: str) -> dict[str, str]:
    trace, sampling = recording.trace(draft, hidden=False), recording.header.sampling
    disagreements = int((~trace.agrees).sum())
    row = {
        "draft": draft,
        "rows": f"{len(trace):,}",
        "disagreements": f"{disagreements:,}",
        "agreement": cells.as_number(trace.agrees.mean(), ".3f"),
    }
    if not sampling.greedy:
        overlap = trace.overlap[trace.trajectory].mean()
        row["Σ min(p, q)"] = cells.as_number(overlap, ".3f")
    if sampling.fixed_output:  # a chain is stopped by its first disagreement
        # SpecDec++, Thm 4.1: one verification a rejection, and one to end each text.
        oracle = (disagreements + len(trace.lengths)) / len(trace.agrees)
        # What a head drafts depends on where its round begins.
        known = draft not in recording.header.eagle_heads
        row["oracle N_target/N"] = cells.as_number(oracle if known else None, ".3f")
    return row


def contents(recording: Recording) -> str:
    """How much was recorded."""
    names = recording.header.pair.drafts
    rows = sum(len(recording.trace(draft, hidden=False)) for draft in names)
    size = sum(file.stat().st_size for file in recording.folder.rglob("shard-*.parquet"))
    outputs, served = recording.prompts.outputs, recording.header.served
    target = "the target" if served is None else f"the server's {served}"
    return (
        f"{len(outputs)} prompts, {sum(map(len, outputs)):,} tokens of {target}, {rows:,} rows,"
        f" {size / 1e6:.1f} MB"
    )
