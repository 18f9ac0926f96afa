"""The nearest configuration that a server can express, found by replay.

All drafters of a grid that the server has settings for are replayed on a recording. The fastest by
estimate is exported, with its share of the speed of the wanted configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from specdec_core.base.errors import UserError
from specdec_core.base.observer import SILENT, Observer
from specdec_core.config import Configuration, DrafterSettings, Memory
from specdec_core.cost import Profile
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.dynamic_tree.settings import DynamicTreeSettings
from specdec_core.drafting.hybrid import HybridSettings
from specdec_core.drafting.policies.confidence import ConfidenceSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.policies.heuristic import HeuristicSettings
from specdec_core.drafting.prompt_lookup import Occurrence, PromptLookupSettings
from specdec_core.drafting.schedule.settings import ScheduleSettings
from specdec_core.drafting.suffix import SuffixSettings
from specdec_core.recordings.replay import Replay
from specdec_core.search.chains import whole_chains
from specdec_core.search.results import METRIC, Trial, by_estimate
from specdec_core.servers.server import Counterpart, Models, Server

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
PER_MATCH = (1.0, 2.0, 4.0)  # candidates for each token of a suffix that is found again
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True)
class Nearest:
    """The drafter that is exported instead, its `share` of the speed of the wanted one by replay
    (None where the wanted one cannot be replayed), and the number of drafters that were `tried`."""

    drafter: DrafterSettings | None
    share: float | None
    tried: int


def expressible(server: Server, models: Models) -> Iterator[DrafterSettings | None]:
    """The drafters of the grid that a server has settings for, once for equal settings; None
    drafts nothing."""
    known: list[Mapping[str, Any]] = []
    for drafter in _grid(models, server.occurrence):
        found = server.counterpart(drafter, models)
        if found is not None and found.settings not in known:
            known.append(found.settings)
            yield drafter


def counterpart_or_nearest(
    server: Server,
    models: Models,
    configuration: Configuration,
    by_replay: Callable[[Callable[[Replay, Profile, Observer], Nearest], str], Nearest],
) -> tuple[Counterpart, Nearest | None]:
    """The settings of a server for a configuration, or else for the nearest that it can express.
    `by_replay` calls a function with a recording and with the reason for the replay. Raises
    :class:`UserError` for an EAGLE head that the server cannot load."""
    for draft in configuration.drafts_of(models.drafts).values():
        refused = draft.refused
        if draft.kind == "eagle" and not server.eagle:
            refused = f"{draft.place}: it is a head of EAGLE-1 or EAGLE-2"
        if refused is not None:
            raise UserError(f"{server.title} cannot load {refused}; --fastest finds other settings")
    counterpart = server.counterpart(configuration.drafter, models)
    if counterpart is not None:
        return counterpart, None
    nearest = by_replay(
        partial(find_nearest, server, models, configuration),
        f"{server.title} has no counterpart of {configuration.label}",
    )
    counterpart = server.counterpart(nearest.drafter, models)
    assert counterpart is not None  # only drafters with a counterpart are tried
    return counterpart, nearest


def find_nearest(
    server: Server,
    models: Models,
    configuration: Configuration,
    replay: Replay,
    profile: Profile,
    observer: Observer = SILENT,
) -> Nearest:
    """The fastest by :func:`rank`. For a schedule, the nearest to its drafter for one request,
    without drafting at the loads at which the schedule drafts nothing. Raises :class:`UserError`
    where the recording can replay none of them."""
    drafter, sampling = configuration.drafter, replay.header.sampling
    wanted = drafter.at(1) if isinstance(drafter, ScheduleSettings) else drafter
    trials = rank(server, models, replay, profile, observer)
    asked, share = Configuration(drafter=wanted, sampling=sampling), None
    if models.drafts:  # the recording's pair may have another one first
        asked = asked.with_draft(next(iter(models.drafts)))
    if replayable(replay, profile, asked):
        own = estimated(asked, replay, profile)
        share = trials[0].metrics[METRIC] / own.metrics[METRIC]
    found = trials[0].configuration.drafter
    if isinstance(drafter, ScheduleSettings):
        found = _resting(server, models, found, drafter)
    return Nearest(found, share, len(trials))


def rank(
    server: Server,
    models: Models,
    replay: Replay,
    profile: Profile,
    observer: Observer = SILENT,
) -> list[Trial]:
    """All of :func:`expressible` that a recording can replay, the fastest by estimate first. The
    profile's times may be the server's; drafts that are not in it are not ranked. Raises
    :class:`UserError` where the recording can replay none of them."""
    sampling = replay.header.sampling
    options = [Configuration(drafter=d, sampling=sampling) for d in expressible(server, models)]
    options = [option for option in options if replayable(replay, profile, option)]
    if not options:
        raise UserError(
            f"{replay.recording.folder}: no settings of {server.title} can be replayed on it"
        )
    observer.stage(f"replaying the settings of {server.title}", len(options))
    trials = []
    for option in options:
        trials.append(estimated(option, replay, profile))
        observer.step()
    return by_estimate(trials)


def replayable(replay: Replay, profile: Profile, option: Configuration) -> bool:
    """Whether a recording and a profile have the drafts of a configuration, and can estimate it."""
    recorded = replay.header.pair.drafts
    drafts = option.drafts_of(recorded)
    return (
        {*option.drafts} <= {None, *recorded}
        and drafts.keys() <= profile.drafts.keys()
        and replay.can(option)
    )


def estimated(option: Configuration, replay: Replay, profile: Profile) -> Trial:
    """A configuration's counts on a recording, and its time by a profile, prompts included where
    it has their times. Rounds are priced by the candidates that each verifies."""
    prompts, rounds = replay.recording.prompts, replay.run(option)
    if profile.whole_chains:
        rounds = whole_chains(option, rounds)
    by_arm = [(arm, r.counts) for arm, own in rounds.by_arm().items() for r in own.by_width()]
    lengths, counts = map(len, prompts.tokens), rounds.counts
    return Trial.of(option, counts, profile, prompts.context, lengths, replayed=True, by_arm=by_arm)


def _resting(
    server: Server, models: Models, found: DrafterSettings | None, schedule: ScheduleSettings
) -> DrafterSettings | None:
    """`found` at the loads at which the schedule drafts, and no drafting at other loads, if the
    server has settings for that; else `found` at every load."""
    if found is None or None not in schedule.ranges.values():
        return found
    ranges = {least: found if d else None for least, d in schedule.ranges.items()}
    resting = ScheduleSettings(ranges=ranges)
    return resting if server.counterpart(resting, models) is not None else found


def _grid(models: Models, occurrence: Occurrence) -> Iterator[DrafterSettings | None]:
    """The drafters to try. Lookups copy after the same `occurrence` as the server's."""
    yield None
    for size, tokens in product((2, 3, 4), (3, 5, 8, 10)):
        lookup = PromptLookupSettings(max_ngram=size, max_tokens=tokens, occurrence=occurrence)
        for least in range(1, size + 1):
            yield lookup.model_copy(update={"min_ngram": least})
    memories: tuple[Memory, ...] = ("request", "all")
    for tokens, bound, memory in product((4, 6, 8, 10, 16), PER_MATCH, memories):
        yield SuffixSettings(max_tokens=tokens, per_match=bound, memory=memory)
    whole = [  # copied to the end, however short the match
        SuffixSettings(max_tokens=tokens, min_match=match, per_match=0, memory="all")
        for tokens, match in product((6, 10, 16), (2, 4, 8))
    ]
    yield from whole
    for draft in models.drafts:
        chains = [
            DraftModelSettings(draft=draft, policy=FixedSettings(max_tokens=k)) for k in LENGTHS
        ]
        yield from chains
        for threshold, most in product(THRESHOLDS, (6, 12)):
            policy = ConfidenceSettings(threshold=threshold, max_tokens=most)
            yield DraftModelSettings(draft=draft, policy=policy)
        for start in (3, 5):
            yield DraftModelSettings(draft=draft, policy=HeuristicSettings(start=start))
        for depth, width, keep in product((3, 5), (2, 4), (8, 16)):
            yield DynamicTreeSettings(
                draft=draft,
                policy=FixedSettings(max_tokens=depth),
                expand=width,
                children=width,
                keep=keep,
            )
        for match, chain in product((2, 3, 4), chains[:6]):
            yield HybridSettings(lookup=SuffixSettings(), min_match=match, otherwise=chain)
        for copied, chain in product(whole, chains[:6]):
            yield HybridSettings(lookup=copied, min_match=copied.min_match, otherwise=chain)
