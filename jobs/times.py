"""Which forward times a command models with: another machine's, a saved profile's, or measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jobs.console import console
from specdec_core.base.errors import UserError
from specdec_core.base.workspace import workspace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec_core.config import Configuration, PairSpec
    from specdec_core.cost import Profile


def forward_times(
    pair: PairSpec,
    configurations: Sequence[Configuration],
    hardware: Path | None,
    profile: Path | None,
) -> Profile:
    """Another machine's times, a saved profile, or the workspace's, where what is missing is
    measured now, the policies' own time included. Raises :class:`UserError` for a profile that
    lacks a draft."""
    from specdec_core.cost import Profile, load_hardware, policy_key
    from specdec_core.models.pair import load_pair
    from specdec_core.studies.profiling import measure_policies, profile_pair

    if hardware is not None:
        return load_hardware(hardware).profile(list(pair.drafts))
    path = profile or workspace() / "profile.json"
    times = Profile.load(path) if profile is not None or path.exists() else None
    for draft in pair.drafts if times else ():
        if draft not in times.drafts:
            there = ", ".join(times.drafts) or "none"
            raise UserError(f"{path}: no forward time of draft {draft!r} (it has: {there})")
    if profile is None:
        known = times.policies if times else {}
        first = next(iter(pair.drafts), "")
        unknown = [
            configuration
            for configuration in configurations
            if any(
                policy.decodes and policy_key(draft or first, policy) not in known
                for draft, policy in configuration.policies
            )
        ]
        if times is None or unknown:
            with console.status("measuring forwards"):
                loaded = load_pair(pair)
                times = times or profile_pair(loaded)
                policies = {**known, **measure_policies(loaded, unknown)}
                times = times.model_copy(update={"policies": policies})
            times.save(path)
    return times
