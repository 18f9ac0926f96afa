"""The forward times of a pair: of a file, of the workspace, or measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from specdec_core.base.environment import machine
from specdec_core.base.names import digest_name
from specdec_core.base.observer import SILENT, Observer
from specdec_core.base.workspace import workspace
from specdec_core.config import Configuration, PairSpec
from specdec_core.cost import Profile, policy_key
from specdec_core.measure.profiling import measure_policies, profile_pair
from specdec_core.models.fingerprints import TARGET, fingerprints
from specdec_core.models.pair import load_pair

_FORMAT = 2  # of the files of times in a workspace


def forward_times(
    pair: PairSpec,
    configurations: Sequence[Configuration],
    profile: Path | None,
    observer: Observer = SILENT,
    weights: Mapping[str, str] | None = None,
) -> Profile:
    """The times of the file `profile`, or of the workspace for the pair, with concrete data types
    and, if recorded, the models' `weights`.
    Times that the workspace lacks, also of the configurations' policies, are measured now. Raises
    :class:`UserError` for a profile that lacks a draft, and for models to measure that are
    missing."""
    if profile is not None:
        return load_profile(profile, pair)
    path = workspace_profile(pair, weights)
    if weights is not None and not path.exists():
        path = workspace_profile(pair)  # what is measured now is of the models that are here
    times = load_profile(path, pair) if path.exists() else None
    measured = times.policies if times else {}
    missing = [c for c in configurations if _policies(pair, c) - measured.keys()]
    if times is None or missing:
        observer.stage(f"loading {pair.name}")
        loaded = load_pair(pair)
        times = times or profile_pair(loaded, observer=observer)
        observer.stage("measuring policies")
        priced = [each.priced(times) for each in missing]
        policies = {**measured, **measure_policies(loaded, priced)}
        times = times.model_copy(update={"policies": policies})
        times.save(path)
    return times


def load_profile(path: Path, pair: PairSpec) -> Profile:
    """The forward times in a file. Raises :class:`UserError` for one that lacks a draft."""
    times = Profile.load(path)
    times.check(pair.drafts, str(path))
    return times.of(pair.drafts)


def timed(pair: PairSpec, path: Path, observer: Observer, needed: Iterable[str]) -> PairSpec:
    """The pair with the drafts that have forward times in a file; the observer is warned of each
    other draft. Raises :class:`UserError` for a file that lacks a `needed` one."""
    times = Profile.load(path)
    times.check(needed, str(path))
    there = times.of(pair.drafts).drafts
    for draft in (name for name in pair.drafts if name not in there):
        observer.warned(f"{path}: no forward time of draft {draft!r}, which is not ranked")
    drafts = {name: model for name, model in pair.drafts.items() if name in there}
    return pair.model_copy(update={"drafts": drafts})


def workspace_profile(
    pair: PairSpec, weights: Mapping[str, str] | None = None, elsewhere: str | None = None
) -> Path:
    """The workspace's file for the times of a pair. It depends on the models, the runner settings
    and the kind of machine; times taken `elsewhere`, in a server or on the devices of a placement,
    have a file of their own. `weights` has the models' fingerprints, perhaps with further ones;
    unset, they are looked up, which raises :class:`UserError` for missing models."""
    names = (TARGET, *pair.drafts)
    prints = fingerprints(pair) if weights is None else {name: weights.get(name) for name in names}
    run = pair.runner.model_dump(mode="json", exclude={"max_length"})
    content = json.dumps([_FORMAT, prints, run, list(machine().values())], sort_keys=True)
    name = pair.name if elsewhere is None else f"{pair.name}-{elsewhere}"
    return workspace() / "profiles" / f"{name}-{digest_name(content)[:8]}.json"


def origin(times: Profile, profile: Path | None) -> str:
    """A description of the machine that the times are of, and of the file `profile` that has
    them."""
    where = f", target in {times.target_dtype}" if profile is None else f" ({profile})"
    return f"forward times: {times.device}{where}"


def _policies(pair: PairSpec, configuration: Configuration) -> set[str]:
    """The keys of the policies with a time to measure: all that can decode."""
    first = next(iter(pair.drafts), "")
    return {
        policy_key(draft or first, policy)
        for draft, policy in configuration.policies
        if policy.decodes
    }
