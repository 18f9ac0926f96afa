"""What a production server's metrics tell of other lengths: `specdec record --from-vllm`."""

from __future__ import annotations

from pathlib import Path

from jobs.console import console, point
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace

LOOKUP = "ngram"  # as a --draft: a lookup alone drafts


def read_production(
    files: list[Path], drafts: list[str] | None, profile: Path | None, out: Path | None
) -> None:
    """Read the metrics of servers, one file a server, and show what other lengths are expected to
    give. Raises :class:`UserError` for a file without metrics of speculation, several `drafts`, and
    one without a `profile`."""
    if drafts and len(drafts) > 1:
        raise UserError("--draft: give one with --from-vllm, that of the server")
    if drafts and profile is None:
        raise UserError("--draft needs --profile, which has its times")
    from dashboards.outputs.console import show
    from dashboards.reports.production import expected, findings, seen
    from dashboards.sections import Section
    from specdec_core.cost import Profile
    from specdec_core.servers.acceptance import expectations, save
    from specdec_core.servers.vllm.metrics import read_metrics

    productions = [read_metrics(file) for file in files]
    if len({each.length for each in productions}) < len(productions):
        raise UserError("--from-vllm: two files of servers with the same length; give one of them")
    times = Profile.load(profile) if profile is not None else None
    draft = None  # a lookup, or without times
    if times is not None and drafts != [LOOKUP]:
        draft = drafts[0] if drafts else next(iter(times.drafts), None)
        if draft is not None:
            known = ", ".join([*times.drafts, LOOKUP])
            times = times.of([draft])
            if draft not in times.drafts:
                raise UserError(f"--draft {draft}: expected one of the profile's: {known}")
    now = productions[0]
    lengths = expectations(productions, range(1, now.length + 3), times, draft)
    lines = findings(lengths, now)
    show(console, [seen(productions), expected(lengths, now), Section(key="so", lines=lines)])
    point("written", save(productions, out or workspace() / "production.json"))
