"""A sweep's first stage where a recording exists: counts without a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, PairSpec
from specdec_core.cost import Profile
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.heads.storage import load_head
from specdec_core.drafting.policies.oracle import OracleSettings
from specdec_core.models.fingerprints import TARGET, fingerprints
from specdec_core.recordings.find import find_recording, open_named
from specdec_core.recordings.replay import Heads, Replay, check_replayable
from specdec_core.recordings.schema import Recording
from specdec_core.search.plan import ResolvedPlan
from specdec_core.search.results import OraclePoint


def recording_of(plan: ResolvedPlan, home: Path, prompts_digest: str) -> Recording | None:
    """The recording that the plan names: a folder, or the name of one in the workspace. Raises
    :class:`UserError` where it is of other prompts or settings. Its weights are not compared; see
    :meth:`Recording.check`."""
    if plan.traces is None or not plan.replay:
        return None
    recording = find_named(plan.traces, home)
    header = recording.header
    for what, recorded, planned in (
        ("prompts", header.prompts.digest[:12], prompts_digest[:12]),
        ("sampling", header.sampling, plan.sampling),
        ("max_new_tokens", header.max_new_tokens, plan.max_new_tokens),
        *(
            (f"runner.{name}", getattr(header.pair.runner, name), getattr(plan.pair.runner, name))
            for name in ("target_dtype", "draft_dtype")
        ),
    ):
        if recorded != planned and planned != "auto":
            raise UserError(
                f"{recording.folder}: recorded with other {what} ({_brief(recorded)}; the sweep "
                f"has {_brief(planned)})"
            )
    return recording


def find_named(name: str, home: Path, drawn: bool = False) -> Recording:
    """The recording in the folder `name`, or of that name in the workspace `home`. Raises
    :class:`UserError` where there is none that is finished and can be replayed, if need be with
    rounds that are `drawn`; see :class:`Replay`."""
    recording = open_named(name, home)
    check_replayable(recording, drawn)
    return recording


def fitting_recording(plan: ResolvedPlan, home: Path, prompts_digest: str) -> Recording | None:
    """A recording in the workspace `home` that the plan does not name and can replay, in any data
    types that it allows; None where there is none, or models are not there yet."""
    if plan.traces is not None or not plan.replay:
        return None
    try:
        prints = fingerprints(plan.pair)
    except UserError:  # models of the hub, which loading the pair fetches
        return None
    settings = plan.sampling, plan.max_new_tokens, plan.pair.runner
    return find_recording(home / "traces", prints, prompts_digest, *settings)


def with_types_of(recording: Recording | None, pair: PairSpec) -> PairSpec:
    """`pair` with the recording's data types, so that timed and recorded models are the same."""
    if recording is None:
        return pair
    recorded = recording.header.pair.runner
    return pair.with_runner(target_dtype=recorded.target_dtype, draft_dtype=recorded.draft_dtype)


def open_replay(
    plan: ResolvedPlan,
    home: Path,
    pair: PairSpec,
    fingerprints: Mapping[str, str],
    named: Recording | None,
    prompts_digest: str,
    prompts: int,
) -> Replay | None:
    """A replay of the recording that the plan names, or else of one in the workspace with the same
    models, data types, prompts and settings; None where there is none. All traces and heads are
    read now.

    Raises :class:`UserError` for a recording of other weights, and for a head that is missing or
    of another pair.
    """
    heads = load_heads(plan.samples, pair, fingerprints)
    if not plan.replay:
        return None
    settings = plan.sampling, plan.max_new_tokens, pair.runner
    recording = named or find_recording(home / "traces", fingerprints, prompts_digest, *settings)
    if recording is None:
        return None
    recording.check(fingerprints)
    if len(recording.prompts.ids) != prompts:  # texts that occur twice are recorded once
        if named is None:
            return None
        raise UserError(
            f"{recording.folder}: has {len(recording.prompts.ids)} of the sweep's {prompts} prompts"
        )
    replay = Replay(recording, heads, hidden=any(each.reads_hidden for each in plan.samples))
    for draft in recording.header.pair.drafts:
        if draft in pair.drafts:
            replay.track(draft)
    return replay


def nothing_fits(home: Path, max_new_tokens: int) -> str:
    """What it means that no recording in the workspace `home` was found for a sweep."""
    return (
        f"nothing is replayed, every configuration is decoded: no recording in {home / 'traces'} is"
        f" of these models, these prompts, this sampling and {max_new_tokens} new tokens; `specdec"
        " record --config` with the sweep's file makes one"
    )


def other_forwards(recording: Recording) -> str:
    """What it means that the other kind of forwards, compiled or eager, is timed."""
    recorded, timed = ("compiled", "eager")
    if not recording.header.pair.runner.compile:
        recorded, timed = timed, recorded
    return (
        f"{recording.folder}: of {recorded} forwards, and {timed} ones are timed, which round"
        " differently: counts may differ; `specdec record --config` with the sweep's file records"
        " what is timed"
    )


def load_heads(
    configurations: Iterable[Configuration], pair: PairSpec, fingerprints: Mapping[str, str]
) -> Heads:
    """The heads of configurations by draft and name: actors on other nodes need not find them on
    disk. Raises :class:`UserError` for one that is missing or of another pair."""
    first = next(iter(pair.drafts), "")
    named = dict.fromkeys((draft or first, head) for c in configurations for draft, head in c.heads)
    target = fingerprints[TARGET]
    return {each: load_head(each[1], fingerprints[each[0]], target) for each in named}


def recorded_oracles(replay: Replay, profile: Profile) -> list[OraclePoint]:
    """The oracle of each recorded draft that the profile knows (SpecDec++, Thm 4.1)."""
    points = []
    for draft in replay.header.pair.drafts:
        drafter = DraftModelSettings(draft=draft, policy=OracleSettings())
        oracle = Configuration(drafter=drafter, sampling=replay.header.sampling)
        known = draft in profile.drafts and draft not in replay.header.eagle_heads
        if known and replay.can(oracle):
            counts = replay.run(oracle).counts
            rate, speedup = counts.metrics()["verification_rate"], profile.speedup(counts, draft)
            points.append(OraclePoint(draft=draft, verification_rate=rate, speedup=speedup))
    return points


def _brief(value: object) -> object:
    return value.model_dump(exclude_defaults=True) if hasattr(value, "model_dump") else value
